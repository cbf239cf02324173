"""Few-shot methods by name, all on the same frozen CLIP. To add one, write its file and import it here."""

from vacsr.fewshot.methods import clipood, mma, mmrl, prompts, vacsr  # noqa: F401  they register themselves
from vacsr.fewshot.methods.base import ClassSet as ClassSet
from vacsr.fewshot.methods.base import FewshotMethod as FewshotMethod
from vacsr.fewshot.methods.base import ShotBatch as ShotBatch
from vacsr.fewshot.methods.clip import ClipModel as ClipModel
