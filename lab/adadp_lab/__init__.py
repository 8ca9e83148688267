"""The evidence beside the library: the paper run again (`paper`), benchmarks (`bench`), experiments."""
