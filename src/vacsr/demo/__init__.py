"""A tour in minutes: three losses train small towers on a generated world of pictures in which every truth is known.

`vacsr demo` runs it. The numbers come out as they are. Settings are in :mod:`.settings`; the way is train
(:mod:`.training`), measure (:mod:`.findings`), look at some answers (:mod:`.gallery`), and tell (:mod:`.text`,
:mod:`.page`).
"""

from vacsr.demo.run import run_demo
from vacsr.demo.settings import METHODS, demo_recipes

__all__ = ["METHODS", "demo_recipes", "run_demo"]
