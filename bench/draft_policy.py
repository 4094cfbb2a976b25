"""Drafts in virtual time: how fast the policy of `scheduling/speculation.py` gets, and how long it takes to learn.

    python bench/draft_policy.py                        # both shapes, 1 and 32 requests, acceptance 0, 0.6, 0.9 and 1
    python bench/draft_policy.py --shapes 8b --batches 32 --acceptances 0.9 --rounds 8 --trace

The engine is in draft_parts/simulation.py. A figure is how many times as fast a round of requests is as without drafts;
the first rounds are those in which costs are still learned. "best" is what the best fixed length of drafts would give,
if all requests had a draft in every step. With --mixed an engine has rounds of all acceptances in turn, and each policy
also learns from the steps of the others, as those of one engine do.
"""

from __future__ import annotations

import argparse

from draft_parts.simulation import DEVICES, Device, Engine
from harness import align


def best_fixed(device: Device, batch: int, acceptance: float, draft: int, plain: float) -> float:
    """Returns the tokens of a request in the time of a step, for the best length of drafts."""
    best = 1.0
    for count in range(1, draft + 1):
        tokens = sum(acceptance**place for place in range(count + 1))
        milliseconds, _ = device.milliseconds(batch * (1 + count), batch)
        best = max(best, tokens * plain / (milliseconds + device.host * batch / 32))  # nothing is planned ahead of it
    return best


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=",".join(DEVICES), help="of " + ", ".join(DEVICES))
    parser.add_argument("--batches", default="1,32")
    parser.add_argument("--acceptances", default="0,0.6,0.9,1")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--draft", type=int, default=7, help="most tokens of a draft (default %(default)s)")
    parser.add_argument("--depth", type=int, default=2, help="steps in flight (default %(default)s)")
    parser.add_argument("--mixed", action="store_true", help="one engine for all acceptances, in turn")
    parser.add_argument("--trace", action="store_true", help="prints the steps of each round, by branches and rows")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    acceptances = list(map(float, args.acceptances.split(",")))
    lines = [["", *(f"round {index + 1}" for index in range(args.rounds)), "best"]]
    for shape in args.shapes.split(","):
        device = DEVICES[shape]
        for batch in map(int, args.batches.split(",")):
            engines = [Engine(device, args.depth, args.draft) for _ in acceptances]
            if args.mixed:
                engines = engines[:1] * len(engines)
            without = Engine(device, args.depth, args.draft)
            plain = min(without.round(without.policy(drafts=False), batch, args.tokens, 0.0) for _ in range(2))
            policies = [engine.policy() for engine in engines]
            ratios: list[list[float]] = [[] for _ in acceptances]
            for index in range(args.rounds):
                for engine, policy, acceptance, found in zip(engines, policies, acceptances, ratios):
                    found.append(plain / engine.round(policy, batch, args.tokens, acceptance))
                    if args.trace:
                        print(f"# {shape}, {batch}, {acceptance:g}, round {index + 1}: {engine.steps.most_common(12)}")
            for acceptance, found in zip(acceptances, ratios):
                best = best_fixed(device, batch, acceptance, args.draft, 1e3 * plain)
                label = f"{shape}, {batch} requests, {acceptance:g} right"
                lines.append([label, *(f"{ratio:.2f}" for ratio in found), f"{best:.2f}"])
    print(align(lines))


if __name__ == "__main__":
    main()
