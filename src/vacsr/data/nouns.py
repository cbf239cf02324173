"""Which nouns the captions of a photo have, by a rule of thumb: no tagger and no word list of nouns.

A word is taken for a noun where it ends a phrase directly after a determiner or a number: "a **dog** in", "the
**beach**.". In "a brown dog" that is neither word, and elsewhere in the captions it is "dog". A word counts if at least
two captions and a tenth of all captions with it use it so. The rule misses nouns that rarely stand alone ("shirt",
"tennis") and keeps a few other words ("close" of "a close up"); singular and plural are two words. English only.
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence

_WORD = re.compile(r"\b\w\w+\b")  # as the word table of the method daa
_BEFORE = "a|an|the|this|that|one|two|three|four|five|six|some|several|many|another|each|other|his|her|their|its"
_AFTER = (
    "in|on|at|of|with|from|to|into|by|near|over|under|through|behind|beside|between|above|along|around|across|during|"
    "against|outside|inside|up|down|off|next|for|as|while|is|are|has|have|that|who|which"
)
_PHRASE_END = re.compile(rf"\b(?:{_BEFORE})\s+(\w\w+)\b(?=\s*(?:$|[.,;])|\s+(?:{_AFTER})\b)")
_NEVER = frozenset((*_BEFORE.split("|"), *_AFTER.split("|")))
_CAPTIONS, _SHARE = 2, 0.1  # captions, and share of the captions with the word, that use it as a noun


def find_nouns(captions: Iterable[str]) -> frozenset[str]:
    """The nouns of a set of captions, lower case, by the rule above.

    >>> sorted(find_nouns(["A brown dog runs on the beach.", "The dog is wet", "a dog near a beach"]))
    ['beach', 'dog']
    """
    used: Counter[str] = Counter()
    as_noun: Counter[str] = Counter()
    for caption in captions:
        text = caption.lower()
        used.update(set(_WORD.findall(text)))
        as_noun.update(set(_PHRASE_END.findall(text)) - _NEVER)
    return frozenset(word for word, times in as_noun.items() if times >= max(_CAPTIONS, _SHARE * used[word]))


def photo_nouns(captions: Sequence[str], images: Sequence[int]) -> dict[int, frozenset[str]]:
    """The nouns in the captions of each photo; ``images`` [M] is the photo of each caption [M]."""
    nouns = find_nouns(captions)
    found: dict[int, set[str]] = {image: set() for image in images}
    for caption, image in zip(captions, images, strict=True):
        found[image] |= nouns.intersection(_WORD.findall(caption.lower()))
    return {image: frozenset(words) for image, words in found.items()}
