"""Methods × settings × seeds from a table file: each cell a run folder, finished cells are never repeated."""

import sys
from types import ModuleType

from vacsr.compare.cells import Cell, list_cells
from vacsr.compare.run import collect, compare, redraw
from vacsr.compare.table import Table, read_table

__all__ = ["Cell", "Table", "collect", "compare", "list_cells", "read_table", "redraw"]


class _Package(ModuleType):
    """``vacsr.compare(TABLE)`` works although the package has the name of the function."""

    __call__ = staticmethod(compare)


sys.modules[__name__].__class__ = _Package
