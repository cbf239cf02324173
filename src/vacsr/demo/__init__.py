"""A tour in minutes: three losses train small towers on in a generated world of pictures whose every truth is known.

`vacsr demo` runs it. The numbers come out as they are. Settings are in :mod:`.settings`; the way is train
(:mod:`.training`), measure (:mod:`.findings`), look at some answers (:mod:`.gallery`), and tell (:mod:`.text`,
:mod:`.page`).
"""

from vacsr.demo.run import run_demo
from vacsr.demo.settings import METHODS, demo_recipes, start_recipe

__all__ = ["METHODS", "demo_recipes", "run_demo", "start_recipe"]
