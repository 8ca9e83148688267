from pathlib import Path

from adadp_lab.bench.kernel_tables import tables

ROOT = Path(__file__).parents[3]


def test_the_committed_table_is_what_the_measurements_give() -> None:
    folder = ROOT / "results" / "bench"
    text = tables(folder)
    assert (folder / "kernels.md").read_text() == text
    for kernel in ("outer clamped", "products norms", "convolution norms", "weighted"):
        assert f"| {kernel} |" in text
