"""Studies whose results are in `results/` and `docs/`. Each is run by `python -m adadp_lab.experiments.NAME`."""
