"""What a caption says before it has words: drawn from a scene, so it is true there, and taken apart into facts.

How a claim comes apart decides how partly true scenes are graded:

- the background is one fact;
- of a thing, its shape is one fact, each property said of it one more ("a star", "a red star", "a large star"), and
  where there are several properties, that one thing has them all. So a blue star earns something where a red one was
  asked for, and a large blue star beside a small red one earns all but the last;
- "two stars" adds to "a star" that there are at least two, and that there are no more;
- a relation is one fact between the shapes, and one more between the things as described.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from vacsr.data.scenes.facts import (
    SIDES,
    WAYS,
    AtLeast,
    Exactly,
    Fact,
    IsBackground,
    Kind,
    Related,
    count,
    stands,
)
from vacsr.data.scenes.objects import Scene, Thing

_PLANS = {"place": 2, "number": 2, "one": 37, "two": 24, "three": 9, "relation": 26}
"""What a caption is about, and how often: the background, how much there is, one to three things, two in relation."""
_BACKGROUND = {"number": 0.6, "one": 0.6, "two": 0.4, "three": 0.25, "relation": 0.35}
"""How often such a caption says the background too."""


@dataclass(frozen=True)
class Mention:
    """Things, as a caption speaks of them."""

    kind: Kind
    number: int | None = None
    """None is "a star": one or more."""
    exact: bool = True
    """Is ``number`` all there are ("two stars"), or a lower bound ("at least two stars")?"""


@dataclass(frozen=True)
class Claim:
    """All that a caption says."""

    mentions: tuple[Mention, ...] = ()
    way: str | None = None
    """How the first of two mentions stands to the second, one of WAYS."""
    background: str | None = None


def facts_of(claim: Claim) -> tuple[Fact, ...]:
    """Take a claim apart.

    >>> star = Mention(Kind("star", colour="red"), number=2)
    >>> for fact in facts_of(Claim((star,), background="beach")):
    ...     print(fact)
    AtLeast(kind=Kind(shape='star', colour=None, size=None, side=None), count=1)
    AtLeast(kind=Kind(shape='star', colour='red', size=None, side=None), count=1)
    AtLeast(kind=Kind(shape='star', colour='red', size=None, side=None), count=2)
    Exactly(kind=Kind(shape='star', colour='red', size=None, side=None), count=2)
    IsBackground(name='beach')
    """
    facts: list[Fact] = [fact for mention in claim.mentions for fact in _mention_facts(mention)]
    if claim.way is not None:
        first, second = (mention.kind for mention in claim.mentions)
        facts += [Related(Kind(first.shape), claim.way, Kind(second.shape)), Related(first, claim.way, second)]
    if claim.background is not None:
        facts.append(IsBackground(claim.background))
    return tuple(dict.fromkeys(facts))


def _mention_facts(mention: Mention) -> Iterator[Fact]:
    kind, noun = mention.kind, Kind(mention.kind.shape)
    if noun != Kind():
        yield AtLeast(noun, 1)
    for name in ("colour", "size", "side"):
        if getattr(kind, name) is not None:
            yield AtLeast(replace(noun, **{name: getattr(kind, name)}), 1)
    if kind != Kind():
        yield AtLeast(kind, 1)
    if mention.number is not None:
        yield AtLeast(kind, mention.number)
        if mention.exact:
            yield Exactly(kind, mention.number)


def draw_claim(scene: Scene, rng: random.Random) -> Claim:
    """Something true of the scene, short or long."""
    plan = rng.choices(list(_PLANS), weights=list(_PLANS.values()))[0]
    if plan == "relation":
        related = _related(scene)
        plan = plan if related else "one"
    if plan == "place":
        return Claim(background=scene.background)
    background = scene.background if rng.random() < _BACKGROUND[plan] else None
    if plan == "relation":
        one, way, other = rng.choice(related)
        first, second = _draw_kinds((one, other), rng)
        return Claim((Mention(first), Mention(second)), way, background)
    if plan == "number":
        return Claim((_draw_total(scene, rng),), background=background)
    wanted = {"one": 1, "two": 2, "three": 3}[plan]
    kinds = _draw_kinds(_draw_things(scene, wanted, rng), rng)
    if len(kinds) == 1:
        kinds = [_maybe_placed(kinds[0], scene, rng)]
    return Claim(tuple(_counted(kind, scene, rng) for kind in kinds), background=background)


def _related(scene: Scene) -> list[tuple[Thing, str, Thing]]:
    """Who stands how to whom, among things that words can tell apart."""
    return [
        (one, way, other)
        for one in scene.things
        for other in scene.things
        for way in WAYS
        if stands(one, way, other) and (one.shape, one.colour) != (other.shape, other.colour)
    ]


def _draw_things(scene: Scene, wanted: int, rng: random.Random) -> list[Thing]:
    """Up to ``wanted`` things, no two of one shape and colour: each can be told from the others in words."""
    chosen: dict[tuple[str, str], Thing] = {}
    for thing in rng.sample(scene.things, len(scene.things)):
        chosen.setdefault((thing.shape, thing.colour), thing)
    return list(chosen.values())[:wanted]


def _draw_kinds(things: Sequence[Thing], rng: random.Random) -> list[Kind]:
    """Describe each by its shape and some properties; one thing alone more fully, things of one shape by colour."""
    shapes = [thing.shape for thing in things]
    colour_often, size_often = (0.85, 0.4) if len(things) == 1 else (0.45, 0.2)
    kinds = []
    for thing in things:
        colour = thing.colour if shapes.count(thing.shape) > 1 or rng.random() < colour_often else None
        size = thing.size if thing.size != "medium" and rng.random() < size_often else None
        kinds.append(Kind(thing.shape, colour, size))
    return kinds


def _maybe_placed(kind: Kind, scene: Scene, rng: random.Random) -> Kind:
    """Sometimes add on which side such a thing is, and sometimes leave out what it is."""
    if kind.colour is not None and rng.random() < 0.05:
        return Kind(colour=kind.colour)
    sides = [side for side in SIDES if count(scene, replace(kind, side=side))]
    return replace(kind, side=rng.choice(sides)) if sides and rng.random() < 0.25 else kind


def _counted(kind: Kind, scene: Scene, rng: random.Random) -> Mention:
    """Say how many there are: mostly where there are several."""
    there, luck = count(scene, kind), rng.random()
    if there == 1:
        return Mention(kind, 1) if luck < 0.06 else Mention(kind)
    if luck < 0.65:
        return Mention(kind, there)
    return Mention(kind, rng.randint(2, there), exact=False) if luck < 0.8 else Mention(kind)


def _draw_total(scene: Scene, rng: random.Random) -> Mention:
    """How many things there are in all, or of one colour."""
    colour = rng.choice(scene.things).colour if rng.random() < 0.5 else None
    kind = Kind(colour=colour)
    return Mention(kind, count(scene, kind))
