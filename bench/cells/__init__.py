"""Cells that pytest-benchmark times: see `bench.cells.test_cells`."""
