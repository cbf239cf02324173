"""``scenes:``, a generated world of pictures with captions, in which the truth of every pair is known.

A scene is a background and a few things with shape, colour, size and place (:mod:`.objects`). A caption states facts
(:mod:`.facts`) that are all true of its own scene, and often of others. Its grade for a scene is the share of its facts
that hold there (:mod:`.truth`), each fact weighing the same.
"""

from vacsr.data.scenes.facts import Fact, Kind, Statement, holds
from vacsr.data.scenes.objects import Scene, Thing
from vacsr.data.scenes.render import SceneRenderer, render_scene
from vacsr.data.scenes.truth import EASY_BELOW, HARD_FROM, PairKinds, pair_kinds, scene_grades
from vacsr.data.scenes.world import SPLITS, SceneOptions, SceneWorld, load_scenes, scene_world

__all__ = [
    "EASY_BELOW",
    "HARD_FROM",
    "SPLITS",
    "Fact",
    "Kind",
    "PairKinds",
    "Scene",
    "SceneOptions",
    "SceneRenderer",
    "SceneWorld",
    "Statement",
    "Thing",
    "holds",
    "load_scenes",
    "pair_kinds",
    "render_scene",
    "scene_grades",
    "scene_world",
]
