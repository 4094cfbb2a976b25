"""Last-token states as embeddings: find the sentence that belongs to a query, without a model trained for it.

    python examples/retrieval.py

A model that predicts the next token sums a sentence up best where it is asked to: after "means in one word".
"""

from __future__ import annotations

import argparse

import torch

from ratoon import LLM, HiddenStatesParams

PAIRS = (  # a sentence, and a query that has few words in common with it
    ("The recipe needs flour, eggs and a pinch of salt.", "ingredients for baking a cake"),
    ("The surgeon removed the patient's appendix this morning.", "an operation in a hospital"),
    ("Our striker scored twice in the last five minutes.", "a football match was won late"),
    ("The central bank raised interest rates again.", "loans are getting more expensive"),
    ("Snow blocked the mountain pass for three days.", "winter weather stopped the traffic"),
    ("The violinist played a slow movement by Bach.", "a concert of classical music"),
    ("A new telescope has photographed a distant galaxy.", "astronomers look at far stars"),
    ("The court sentenced the thief to two years in prison.", "a judge punished a criminal"),
    ("Farmers hope for rain before the wheat dries out.", "a drought threatens the harvest"),
    ("The ferry crosses to the island four times a day.", "travelling over water by ship"),
    ("She repaired the engine and changed the brake pads.", "a mechanic works on a car"),
    ("The class learned how to divide fractions.", "a mathematics lesson at school"),
    ("Wolves have returned to the forests of the north.", "wild animals live here again"),
    ("The phone's battery lasts for two whole days.", "a mobile device that needs little charging"),
    ("Voters will elect a new parliament in May.", "people choose their government"),
    ("The gallery shows portraits by a Dutch painter.", "an exhibition of art"),
    ("He lost ten kilos by running every evening.", "sport helps against being overweight"),
    ("The bride wore a long white dress.", "a couple gets married"),
    ("Firefighters saved a family from the burning house.", "rescue from a blaze"),
    ("The bridge was closed because its steel had rusted.", "an old structure is not safe"),
    ("The company dismissed two hundred workers.", "many people lost their jobs"),
    ("The dentist filled a hole in my tooth.", "help for somebody with a painful mouth"),
    ("An earthquake shook the coast at midnight.", "the ground moved and buildings trembled"),
    ("Bees carry pollen from one flower to the next.", "insects help plants to reproduce"),
)
PROMPTS = {"the text alone": "{}", "asked to sum up": 'This sentence: "{}" means in one word: "'}


def embed(llm: LLM, texts: list[str]) -> torch.Tensor:
    """[texts, hidden], of length 1. What all texts have in common says nothing, so their mean is taken off."""
    outputs = llm.extract_hidden_states(texts, HiddenStatesParams(positions=-1))
    vectors = torch.stack([output.tensor[0, 0] for output in outputs])
    return torch.nn.functional.normalize(vectors - vectors.mean(0), dim=1)


def word_overlap(queries: list[str], sentences: list[str]) -> torch.Tensor:
    """[queries, sentences]: how many words they share."""
    return torch.tensor([[float(len({*a.split()} & {*b.split()})) for b in sentences] for a in queries])


def recall_at_1(scores: torch.Tensor) -> float:
    return (scores.argmax(1) == torch.arange(len(scores))).float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer sentences")
    sentences, queries = map(list, zip(*(PAIRS[:12] if parser.parse_args().quick else PAIRS)))
    print(f"recall@1 of {len(queries)} queries among {len(sentences)} sentences")
    print(f"{'common words':18}{recall_at_1(word_overlap(queries, sentences)):4.0%}")
    with LLM("smollm2-135m", kv_memory="256MiB") as llm:
        for name, prompt in PROMPTS.items():
            asked, found = (embed(llm, [prompt.format(text) for text in texts]) for texts in (queries, sentences))
            scores = asked @ found.T
            print(f"{name:18}{recall_at_1(scores):4.0%}")
    for index in range(3):
        print(f"{scores[index].max():.2f}  {queries[index]} → {sentences[scores[index].argmax()]}")


if __name__ == "__main__":
    main()
