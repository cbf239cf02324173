"""Methods by name. To add one, write its file and import it here; importing the package registers them all."""

from vacsr.methods import bicro, daa, infonce, ncr, npc, pcme, pcmepp, sigmoid, vacsr, vse  # noqa: F401
from vacsr.methods.base import Embedding as Embedding
from vacsr.methods.base import Method as Method
from vacsr.methods.base import build_method as build_method
