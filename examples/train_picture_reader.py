"""Trains a very small model that reads pictures, saves it as a folder of Hugging Face's form, and asks it with Ratoon.

    python examples/train_picture_reader.py picture-reader
    ratoon chat picture-reader --image picture-reader/drawing.png

or, by a server:

    ratoon serve picture-reader
    ratoon chat --url http://127.0.0.1:8000 --image picture-reader/drawing.png

The model is an Idefics3 (as SmolVLM is) of a quarter of a million weights: a vision transformer, a projection and a
Llama. It learns from drawn digits and shapes to say what is in a picture and which colour it has; it knows nothing
else. Takes some minutes on two CPU cores. Needs `transformers` and `Pillow`.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path

import torch
import transformers
from PIL import Image, ImageDraw, ImageFont
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SIDE, PATCH, MERGED = 64, 8, 2  # pixels of a picture and of a patch; patches on a side that become one row
NUM_ROWS = (SIDE // PATCH // MERGED) ** 2  # rows of embeddings in the place of a picture
CANVASES = (64, 96, 128, 200)  # sizes in which pictures are drawn
COLOURS = {
    "red": (214, 39, 40), "green": (30, 140, 50), "blue": (31, 90, 200), "orange": (250, 140, 10),
    "black": (20, 20, 20),
}  # fmt: skip
SHAPES = ("circle", "square", "triangle", "cross")
DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
QUESTIONS = ("What is in the picture?", "Which colour is it?")
AROUND, GLOBAL, IMAGE, START, END, PAD = (
    "<fake_token_around_image>", "<global-img>", "<image>", "<|im_start|>", "<end_of_utterance>", "<|pad|>",
)  # fmt: skip
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<end_of_utterance>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
STEPS, QUICK_STEPS = 1500, 20
BATCH = 32
LEARNING_RATE = 2e-3
INITIAL = 0.08  # the spread of weights at the beginning; the usual one is for wider models


# ---- pictures ----


def draw(thing: str, colour: str, canvas: int, chance: random.Random) -> Image.Image:
    """A digit or a shape somewhere on a white canvas."""
    picture = Image.new("RGB", (canvas, canvas), "white")
    pencil, size = ImageDraw.Draw(picture), canvas * chance.uniform(0.7, 0.85)
    left, top = chance.uniform(0.05, 0.95) * (canvas - size), chance.uniform(0.05, 0.95) * (canvas - size)
    right, bottom, fill = left + size, top + size, COLOURS[colour]
    if thing in DIGITS:
        middle = (left + size / 2, top + size / 2)
        pencil.text(middle, str(DIGITS.index(thing)), fill, ImageFont.load_default(size * 1.2), anchor="mm")
    elif thing == "circle":
        pencil.ellipse((left, top, right, bottom), fill)
    elif thing == "square":
        pencil.rectangle((left, top, right, bottom), fill)
    elif thing == "triangle":
        pencil.polygon(((left, bottom), (right, bottom), ((left + right) / 2, top)), fill)
    else:
        third = size / 3
        pencil.rectangle((left + third, top, right - third, bottom), fill)
        pencil.rectangle((left, top + third, right, bottom - third), fill)
    return picture


def answer_to(question: str, thing: str, colour: str) -> str:
    if question == QUESTIONS[1]:
        return f"It is {colour}."
    return f"The digit {thing}." if thing in DIGITS else f"A {thing}."


def draw_any(chance: random.Random) -> tuple[Image.Image, str, str]:
    thing, colour = chance.choice((*SHAPES, *DIGITS)), chance.choice(list(COLOURS))
    return draw(thing, colour, chance.choice(CANVASES), chance), thing, colour


def pixels_of(picture: Image.Image) -> torch.Tensor:
    """[3, SIDE, SIDE], from -1 to 1, as the model's files say that pictures are prepared."""
    resized = picture.resize((SIDE, SIDE), Image.Resampling.LANCZOS)
    flat = torch.frombuffer(bytearray(resized.tobytes()), dtype=torch.uint8)
    return flat.view(SIDE, SIDE, 3).permute(2, 0, 1).float() / 127.5 - 1


# ---- the model ----


def make_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Made of the few sentences that there are: every word is a token."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    texts = [*QUESTIONS, "user", "assistant", "system"]
    texts += [
        answer_to(question, thing, colour)
        for question in QUESTIONS
        for thing in (*SHAPES, *DIGITS)
        for colour in COLOURS
    ]
    special = [PAD, START, END, AROUND, GLOBAL, IMAGE]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        texts, trainers.BpeTrainer(special_tokens=special, initial_alphabet=alphabet, vocab_size=512)
    )
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=END,
        bos_token=START,
        additional_special_tokens=[AROUND, GLOBAL, IMAGE],
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def make_model(tokenizer: transformers.PreTrainedTokenizerFast) -> transformers.Idefics3ForConditionalGeneration:
    end, pad = tokenizer.convert_tokens_to_ids([END, PAD])
    text = transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=True, pad_token_id=pad,
        eos_token_id=end, bos_token_id=None, initializer_range=INITIAL,
    )  # fmt: skip
    config = transformers.Idefics3Config(
        text_config=text,
        vision_config={
            "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 4,
            "image_size": SIDE, "patch_size": PATCH, "initializer_range": INITIAL,
        },
        scale_factor=MERGED, image_token_id=tokenizer.convert_tokens_to_ids(IMAGE), pad_token_id=pad,
        tie_word_embeddings=True,
    )  # fmt: skip
    model = transformers.Idefics3ForConditionalGeneration(config)
    model.generation_config = transformers.GenerationConfig(
        eos_token_id=end, pad_token_id=pad, do_sample=False, max_new_tokens=16
    )
    return model


def prompt_of(tokenizer: transformers.PreTrainedTokenizerFast, question: str) -> list[int]:
    """The token ids of a question about a picture, which come before the answer."""
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": question}]}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    rows = f"{AROUND}{GLOBAL}{IMAGE * NUM_ROWS}{AROUND}"
    return tokenizer.encode(text.replace(IMAGE, rows), add_special_tokens=False)


def make_batch(
    tokenizer: transformers.PreTrainedTokenizerFast, size: int, chance: random.Random
) -> dict[str, torch.Tensor]:
    prompts = {question: prompt_of(tokenizer, question) for question in QUESTIONS}
    pictures, rows = [], []
    for _ in range(size):
        picture, thing, colour = draw_any(chance)
        question = chance.choice(QUESTIONS)
        prompt = prompts[question]
        answer = tokenizer.encode(answer_to(question, thing, colour) + END, add_special_tokens=False)
        pictures.append(pixels_of(picture))
        rows.append((prompt + answer, [-100] * len(prompt) + answer))  # only answers are learned
    longest = max(len(ids) for ids, _ in rows)
    ids = torch.tensor([ids + [tokenizer.pad_token_id] * (longest - len(ids)) for ids, _ in rows])
    labels = torch.tensor([labels + [-100] * (longest - len(labels)) for _, labels in rows])
    mask = torch.tensor([[1] * len(ids) + [0] * (longest - len(ids)) for ids, _ in rows])
    return {"input_ids": ids, "labels": labels, "attention_mask": mask, "pixel_values": torch.stack(pictures)[:, None]}


def train(
    num_steps: int, seed: int = 0
) -> tuple[transformers.Idefics3ForConditionalGeneration, transformers.PreTrainedTokenizerFast]:
    torch.manual_seed(seed)
    chance, tokenizer = random.Random(seed), make_tokenizer()
    model = make_model(tokenizer).train()
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, num_steps, pct_start=0.1)
    began = time.monotonic()
    for step in range(num_steps):
        loss = model(**make_batch(tokenizer, BATCH, chance)).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 49 or step == num_steps - 1:
            print(f"step {step + 1}: loss {loss.item():.3f}, {time.monotonic() - began:.0f} s", flush=True)
    return model.eval(), tokenizer


def save(
    model: transformers.Idefics3ForConditionalGeneration, tokenizer: transformers.PreTrainedTokenizerFast, folder: Path
) -> None:
    """What the model's processor does with pictures is a file as well."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    preparation = {
        "image_processor_type": "Idefics3ImageProcessor", "processor_class": "Idefics3Processor",
        "do_convert_rgb": True, "do_resize": True, "size": {"longest_edge": SIDE}, "resample": 1,
        "do_image_splitting": False, "max_image_size": {"longest_edge": SIDE}, "do_rescale": True,
        "rescale_factor": 1 / 255, "do_normalize": True, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
        "do_pad": True,
    }  # fmt: skip
    (folder / "preprocessor_config.json").write_text(json.dumps(preparation, indent=2))
    facts = {"processor_class": "Idefics3Processor", "image_seq_len": NUM_ROWS}
    (folder / "processor_config.json").write_text(json.dumps(facts, indent=2))


def ask(folder: Path, num_pictures: int, seed: int = 1) -> int:
    """Asks about pictures that were not trained on, and returns the number of right answers."""
    from ratoon import LLM, SamplingParams

    chance = random.Random(seed)
    questions, expected = [], []
    for index in range(num_pictures):
        picture, thing, colour = draw_any(chance)
        question = QUESTIONS[index % len(QUESTIONS)]
        content = [{"type": "image", "image": picture}, {"type": "text", "text": question}]
        questions.append([{"role": "user", "content": content}])
        expected.append(answer_to(question, thing, colour))
    with LLM(str(folder)) as llm:
        outputs = llm.chat(questions, SamplingParams(temperature=0.0, max_tokens=16))
    answers = [output.outputs[0].text.strip() for output in outputs]
    for answer, wanted in list(zip(answers, expected))[:6]:
        print(f"{answer:24} {'right' if answer == wanted else f'wrong: {wanted}'}")
    return sum(answer == wanted for answer, wanted in zip(answers, expected))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("picture-reader"), help="where the model is saved")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--quick", action="store_true", help="a few steps only: the model learns nothing")
    args = parser.parse_args()
    model, tokenizer = train(QUICK_STEPS if args.quick else args.steps)
    save(model, tokenizer, args.folder)
    num_pictures = 8 if args.quick else 64
    print(f"{ask(args.folder, num_pictures)} of {num_pictures} answers are right")
    drawing = args.folder / "drawing.png"
    draw("seven", "blue", 200, random.Random(2)).save(drawing)
    print(f"Ask it about a drawing:\n    ratoon chat {args.folder} --image {drawing}")
    print("Or by a server, which takes pictures as data URLs in `image_url`:")
    print(f"    ratoon serve {args.folder}\n    ratoon chat --url http://127.0.0.1:8000 --image {drawing}")


if __name__ == "__main__":
    main()
