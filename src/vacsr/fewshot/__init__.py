"""Few-shot recognition: ``run_fewshot`` fills a run folder, ``load_fewshot`` loads the model that it left."""

from vacsr.fewshot.config import FewshotRecipe as FewshotRecipe
from vacsr.fewshot.config import fewshot_from as fewshot_from
from vacsr.fewshot.config import read_fewshot as read_fewshot
from vacsr.fewshot.model import FewshotModel as FewshotModel
from vacsr.fewshot.model import load_fewshot as load_fewshot
from vacsr.fewshot.run import check_fewshot as check_fewshot
from vacsr.fewshot.run import run_fewshot as run_fewshot
