"""The prompts of `ratoon demo`: different lengths, two that begin with the same long text, one document."""

from __future__ import annotations

from dataclasses import dataclass

LIBRARY = """\
You are the assistant of a small public library. People of all ages write to you, and many of them are in a \
hurry. Answer politely and briefly, in plain words that a child can follow. Begin with the answer itself and \
leave out greetings. When a question asks for several things, give a numbered list with one short sentence for \
each. When a question asks how something works, explain it in two or three sentences and name one example from \
daily life. Do not invent titles of books, names of people or numbers. If you are not sure about something, say \
so and advise the reader to ask at the desk, where the librarians are glad to help. The library is open from \
Tuesday to Saturday, has a reading room for children, a quiet room for students and a garden with benches, and \
lends books, maps, films and board games for four weeks."""

HONEYBEES = """\
Summarize the following text in two sentences.

Honeybees live in colonies that may hold fifty thousand workers in early summer and fewer than ten thousand at \
the end of winter. Nearly all of them are sisters, daughters of a single queen who lays up to two thousand eggs \
a day when food is plentiful. A worker's tasks change with her age. For the first days after she leaves her cell \
she cleans the comb. Then she feeds larvae with a secretion from glands in her head, later she builds wax, \
receives nectar from returning bees, and guards the entrance. Only in the last two or three weeks of her life \
does she leave the hive to gather nectar, pollen, water and resin. This order is not fixed: if a beekeeper \
removes most of the foragers, younger bees begin to fly early, and if the nurses are lost, old foragers can take \
up nursing again, and their glands grow back.
A forager that finds a good patch of flowers tells others about it by dancing on the comb. She runs in a \
straight line while shaking her body, circles back, and repeats the run many times. The angle of the run to the \
vertical gives the direction of the flowers relative to the sun, and its duration gives the distance. Other bees \
follow her closely in the dark, feel the air move, smell the flowers on her, and then fly out to search. The \
better the source, the longer she dances, and so the colony shifts its workers to where they gain the most \
without any bee having to compare the sources.
In late spring a strong colony may divide. The old queen leaves with about half of the workers and hangs in a \
cluster from a branch while scouts look for a new home. Each scout that finds a hollow advertises it with the \
same dance. Over hours or days the dances for poor sites fade, the dances for the best site grow, and when \
enough scouts meet at one place the swarm takes off together and moves in. The daughters who stay behind raise a \
new queen from an egg by feeding the larva with royal jelly throughout its growth."""


@dataclass(frozen=True, slots=True)
class DemoPrompt:
    title: str
    text: str
    max_tokens: int
    system: str | None = None
    after: str | None = None  # title of the prompt that must have been read before this one is sent


DEMO_PROMPTS = (
    DemoPrompt("question", "What is gravity?", 72),
    DemoPrompt("story", "Write a two-sentence story about a lighthouse.", 64),
    DemoPrompt("library 1", "What are three good reasons to read books?", 72, system=LIBRARY),
    DemoPrompt("document", HONEYBEES, 96),
    DemoPrompt("code", "Write a Python function that returns the greatest number in a list.", 88),
    DemoPrompt("library 2", "How does a rainbow form?", 80, system=LIBRARY, after="library 1"),
)
