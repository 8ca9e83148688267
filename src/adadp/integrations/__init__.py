"""adadp inside other people's tools."""
