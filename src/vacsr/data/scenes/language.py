"""Words for a claim. The same claim can be worded in many ways; every wording means the same."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from vacsr.data.scenes.claims import Claim, Mention

NUMBERS = ("no", "one", "two", "three", "four", "five", "six")
NOUNS: Mapping[str, tuple[str, ...]] = {
    "ball": ("ball", "ball", "beach ball"),
    "gift": ("gift", "present"),
    "star": ("star",),
    "heart": ("heart",),
    "moon": ("moon", "moon", "crescent moon"),
    "house": ("house", "house", "cottage"),
    "tree": ("tree", "tree", "fir tree"),
    "fish": ("fish",),
    "boat": ("boat", "boat", "sailing boat"),
    "mushroom": ("mushroom", "mushroom", "toadstool"),
    "": ("thing", "object"),
}
"""The first is the usual word; "" stands for a thing of any shape."""
ADJECTIVES: Mapping[str, tuple[str, ...]] = {
    "small": ("small", "little"),
    "large": ("large", "big"),
    "purple": ("purple", "purple", "violet"),
}
"""Other properties are said by their own name."""
WHERE: Mapping[str, tuple[str, ...]] = {
    "meadow": ("in a meadow", "on a green meadow", "among green hills", "in a green field"),
    "beach": ("on a beach", "at the beach", "by the sea", "on a sandy beach"),
    "snow": ("in the snow", "in a snowy landscape", "on a snowy day"),
    "night": ("at night", "under a night sky", "in the dark of night"),
    "city": ("in the city", "in a city at dusk", "in front of a skyline"),
    "desert": ("in the desert", "in a desert", "among sand dunes"),
    "underwater": ("under water", "in the deep sea", "under the sea"),
}
SIGHT: Mapping[str, tuple[str, ...]] = {
    "meadow": ("a meadow", "a green meadow", "a green field"),
    "beach": ("a beach", "a sandy beach", "the seaside"),
    "snow": ("a snowy landscape", "snow-covered hills", "a snowy day"),
    "night": ("a night sky", "a clear night", "a dark night"),
    "city": ("a city at dusk", "a city skyline", "a skyline at dusk"),
    "desert": ("a desert", "sand dunes", "a sandy desert"),
    "underwater": ("the deep sea", "a view under water", "an underwater scene"),
}
SIDE_WORDS: Mapping[str, tuple[str, ...]] = {
    "left": ("on the left", "on the left side"),
    "right": ("on the right", "on the right side"),
    "top": ("at the top", "near the top"),
    "bottom": ("at the bottom", "near the bottom"),
}
_FORWARD: Mapping[str, tuple[str, ...]] = {"left of": ("left of", "to the left of"), "above": ("above", "over")}
_BACKWARD: Mapping[str, tuple[str, ...]] = {"left of": ("right of", "to the right of"), "above": ("below", "under")}
_WITH: Mapping[str, tuple[str, str]] = {"left of": ("to its left", "to its right"), "above": ("above it", "below it")}
_OPENINGS = ("a picture of", "a scene with", "a drawing of")


def say(claim: Claim, rng: random.Random) -> str:
    """One wording.

    >>> from vacsr.data.scenes.facts import Kind
    >>> fish, house = Mention(Kind("fish", "yellow", "small")), Mention(Kind("house", "red"))
    >>> say(Claim((fish, house), "left of", "snow"), random.Random(0))
    'a red house to the right of a small yellow fish in a snowy landscape'
    """
    if not claim.mentions:
        sight = rng.choice(SIGHT[claim.background or ""])
        return rng.choice((sight, sight, f"a picture of {sight}"))
    shapes = [mention.kind.shape or "" for mention in claim.mentions]
    nouns = {shape: rng.choice(NOUNS[shape]) for shape in shapes}  # one word a shape: no "house and cottage"
    phrases = [mention_words(mention, nouns, rng=rng) for mention in claim.mentions]
    body = listed(phrases) if claim.way is None else _related(phrases, claim.way, rng)
    placed = any(mention.kind.side for mention in claim.mentions)
    return _framed(body, claim=claim, placed=placed, rng=rng)


def _framed(body: str, *, claim: Claim, placed: bool, rng: random.Random) -> str:
    """Add the background and an opening. A body that ends in a side keeps the background away from it."""
    first = claim.mentions[0]
    verb = "there are" if is_plural(first) else "there is"
    openings = [opening for opening in (*_OPENINGS, verb) if not (opening.endswith("with") and " with " in body)]
    opening = rng.choice(openings) if rng.random() < 0.3 else ""
    if claim.background is None:
        return f"{opening} {body}".strip()
    where = rng.choice(WHERE[claim.background])
    if placed or rng.random() < 0.15:
        return f"{where}, {body}" if rng.random() < 0.6 else f"{where} {verb} {body}"
    return f"{opening} {body} {where}".strip()


def _related(phrases: Sequence[str], way: str, rng: random.Random) -> str:
    """A stands so to B, said from either end."""
    first, second = phrases
    luck = rng.random()
    if luck < 0.4:
        return f"{first} {rng.choice(_FORWARD[way])} {second}"
    if luck < 0.7:
        return f"{second} {rng.choice(_BACKWARD[way])} {first}"
    ahead, behind = _WITH[way]
    return f"{second} with {first} {ahead}" if luck < 0.85 else f"{first} with {second} {behind}"


def mention_words(mention: Mention, nouns: Mapping[str, str], *, rng: random.Random) -> str:
    """A noun phrase; ``nouns`` has the word for each shape.

    >>> from vacsr.data.scenes.facts import Kind
    >>> mention_words(Mention(Kind("fish", colour="orange"), number=3), {"fish": "fish"}, rng=random.Random(0))
    'three orange fish'
    """
    kind = mention.kind
    adjectives = [rng.choice(ADJECTIVES.get(word, (word,))) for word in (kind.size, kind.colour) if word]
    if kind.shape is None and mention.number is None and rng.random() < 0.5:
        words = f"something {' and '.join(adjectives)}"
    else:
        words = _quantified(mention, " ".join([*adjectives, nouns[kind.shape or ""]]), rng)
    return f"{words} {rng.choice(SIDE_WORDS[kind.side])}" if kind.side else words


def _quantified(mention: Mention, noun: str, rng: random.Random) -> str:
    """Put "a", a number or a bound before the noun."""
    number = mention.number
    if number is None:
        return with_article(noun)
    if not mention.exact:
        bound = rng.choice((f"at least {NUMBERS[number]}", f"{NUMBERS[number]} or more"))
        return f"{bound} {plural(noun)}"
    if number == 1:
        return f"{rng.choice(('just one', 'only one', 'a single'))} {noun}"
    return f"{NUMBERS[number]} {plural(noun)}"


def is_plural(mention: Mention) -> bool:
    """Does it take "there are"?"""
    return mention.number is not None and mention.number > 1


def with_article(words: str) -> str:
    """``a`` or ``an``; the vocabulary has no silent h and no long u.

    >>> with_article("orange fish"), with_article("fish")
    ('an orange fish', 'a fish')
    """
    return f"{'an' if words[0] in 'aeiou' else 'a'} {words}"


def plural(noun: str) -> str:
    """Of the nouns of this world.

    >>> [plural(noun) for noun in ("red star", "fish")]
    ['red stars', 'fish']
    """
    return noun if noun.endswith("fish") else f"{noun}s"


def listed(phrases: Sequence[str]) -> str:
    """``a``, ``a and b``, ``a, b and c``."""
    return " and ".join([", ".join(phrases[:-1]), phrases[-1]] if len(phrases) > 1 else phrases)
