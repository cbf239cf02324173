"""Methods by name. To add one, write its file and add its line here; importing the package registers them all."""

from __future__ import annotations

from vacsr.methods.base import Embedding as Embedding
from vacsr.methods.base import Method as Method
from vacsr.methods.base import ParamGroup as ParamGroup
from vacsr.methods.base import RetrievalConfig as RetrievalConfig
from vacsr.methods.base import build_method as build_method
from vacsr.methods.base import register as register
from vacsr.methods.bicro import Bicro as Bicro
from vacsr.methods.daa import Daa as Daa
from vacsr.methods.infonce import InfoNCE as InfoNCE
from vacsr.methods.ncr import Ncr as Ncr
from vacsr.methods.npc import Npc as Npc
from vacsr.methods.pcme import Pcme as Pcme
from vacsr.methods.pcmepp import Pcmepp as Pcmepp
from vacsr.methods.sigmoid import Sigmoid as Sigmoid
from vacsr.methods.vacsr import Vacsr as Vacsr
from vacsr.methods.vse import Vse as Vse
