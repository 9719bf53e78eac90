"""The paper's offline studies on recorded windows, one file per table."""
