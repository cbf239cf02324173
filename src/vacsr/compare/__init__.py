"""Methods × settings × seeds from a table file: each cell a run folder, finished cells are never repeated."""

from vacsr.compare.cell import Cell, cells, run_cell
from vacsr.compare.reading import read_table
from vacsr.compare.run import collect, compare, redraw, write_results
from vacsr.compare.table import Table, TableRow, Variant

__all__ = [
    "Cell",
    "Table",
    "TableRow",
    "Variant",
    "cells",
    "collect",
    "compare",
    "read_table",
    "redraw",
    "run_cell",
    "write_results",
]
