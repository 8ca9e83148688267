"""What reports of the paper, of benchmarks and of experiments share: files, tables, figures."""
