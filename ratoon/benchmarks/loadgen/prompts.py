"""Random prompts of a wanted number of tokens: of token ids, exactly, or of words, about.

Both draw from common words, so that no prompt holds a special token or leaves the vocabulary.
"""

from __future__ import annotations

import random
from typing import Protocol

Prompt = str | list[int]

# Common words, which most tokenizers know as one token each. A server is asked what it makes of them.
VOCABULARY = """\
about across after air almost also among another any area art away bank bear bed begin being better big black board
body both box bread brother build busy call capital care case catch cell center change child city clean close coast
color common copy corner could country cover cross current dance day deal death deep design differ distance doctor
door draw dress drop during early east eat effect eight electric end engine enter even event every example exercise
eye fact fall famous farm father feed few fight fill find finger fire fish five floor flower follow foot forest
forward free friend front full game gas general get give glass gold govern grass great ground grow guide half happen
hard have hear heat held here hill hold home horse hour how human hunt imagine include industry instant iron job jump
keep kind knew lake language last laugh lead leave length letter life light line listen live long lost love machine
make map market master material mean meat metal might milk mind miss moment month more most motion mouth much must
nation near need new night noise note notice number ocean office oil once only operate other over oxygen paint paper
part pass path pay perhaps person picture place plan planet play point port possible practice present pretty problem
product protect pull quart quick race rail raise rather read real record region repeat represent result ride ring
river rock room rope round rule safe salt sand say school score search seat seed segment self send sentence serve
several share sheet shine shoe shore should show sight silent similar since sister size skin sleep small smile soft
soldier some song sound space special speed spend spot spring stand start station steam step still stood store
straight stream stretch student subject such sugar suit sun support surface swim table take tall team tell ten test
that there thick think those thought three time together tool total toward track train tree trip truck try turn two
under until usual value very village voice wait wall war wash water way weather weight west when whether while whole
wide wild wind wing wire woman wood work would year young"""
WORDS = tuple(VOCABULARY.split())


class PromptMaker(Protocol):
    def make(self, num_tokens: int, source: random.Random) -> Prompt: ...


class TokenPrompts:
    """Prompts of token ids, drawn from those that the server itself makes of common words."""

    def __init__(self, token_ids: list[int]) -> None:
        self._token_ids = sorted(set(token_ids))

    def make(self, num_tokens: int, source: random.Random) -> list[int]:
        return source.choices(self._token_ids, k=num_tokens)


class TextPrompts:
    """Prompts of words, for servers and endpoints that take text alone."""

    def __init__(self, tokens_per_word: float) -> None:
        self._tokens_per_word = tokens_per_word

    def make(self, num_tokens: int, source: random.Random) -> str:
        return " ".join(source.choices(WORDS, k=max(1, round(num_tokens / self._tokens_per_word))))
