"""Trains the small model that `pdlink up` starts without `--model`, and writes it to `pdlink/engine/small/`.

    .venv/bin/python tools/small_model/train.py [--minutes 15]    of CPU

It learns `answers.txt` by heart, and the sound of pdlink's own pages: enough that a first answer can be read, in
less than 2 MB. It says nothing that is not in these texts. Its answers depend on the prompt through the KV of every
layer, so KV that is wrong shows.
"""

from __future__ import annotations

import argparse
import random
import re
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from pdlink.engine.tiny import CHAT_TEMPLATE, SPECIAL_TOKENS

ROOT = Path(__file__).parents[2]
OUT = ROOT / "pdlink/engine/small"
END, PAD = "<|end|>", "<|pad|>"
VOCABULARY, CONTEXT, BATCH = 1024, 160, 16
PARAPHRASES = {
    "What is ": ("Tell me what {} is.", "Explain {}.", "What's {}?", "what is {}"),
    "What does ": ("Tell me what {}.", "what does {}"),
    "How do I ": ("Tell me how to {}.", "how do i {}"),
    "What happens when ": ("What if {}?", "what happens when {}"),
}


def answers() -> list[tuple[str, str]]:
    """Prompts, several ways to say each, and what follows."""
    found = []
    for line in (Path(__file__).parent / "answers.txt").read_text().splitlines():
        asked, _, said = (part.strip() for part in line.partition("|"))
        found.append((asked, said))
        for start, forms in PARAPHRASES.items():
            if asked.startswith(start):
                rest = asked.removeprefix(start).rstrip("?")
                found += [(form.format(rest), said) for form in forms]
    return found


def prose() -> str:
    """The sentences of our pages, without tables, code and links' targets."""
    kept = []
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        if page.stem in ("settings", "cli"):
            continue
        lines = [line for line in page.read_text().splitlines() if line[:1] not in ("|", "!", "<", "`", "#", " ")]
        text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", "\n".join(lines))
        text = re.sub(r"[*`]", "", text)
        kept += [" ".join(paragraph.split()) for paragraph in text.split("\n\n")]
    return "\n".join(paragraph for paragraph in kept if len(paragraph) > 80)


def make_tokenizer(text: str) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text.splitlines(), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token=PAD, chat_template=CHAT_TEMPLATE
    )


def make_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=128,
            intermediate_size=320,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=8192,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.convert_tokens_to_ids(END),
            pad_token_id=tokenizer.convert_tokens_to_ids(PAD),
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=15.0, help="of CPU; default 15")
    minutes = parser.parse_args().minutes
    torch.set_num_threads(1)
    torch.manual_seed(1)
    random.seed(1)
    pairs, text = answers(), prose()
    tokenizer = make_tokenizer(text + "\n" + "\n".join(f"{asked} {said}" for asked, said in pairs))
    model = make_model(tokenizer)
    pages = torch.tensor(tokenizer.encode(text))
    end, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    dialogues = []
    for asked, said in pairs:
        # As a chat, and as text that goes on; what was asked is not learned, or the model would ask.
        chat = tokenizer.encode(f"<|user|>{asked}{END}<|assistant|>")
        dialogues.append((chat, [*tokenizer.encode(said), end]))
        dialogues.append((tokenizer.encode(asked), [*tokenizer.encode(" " + said), end]))
    print(
        f"{sum(each.numel() for each in model.parameters()):,} weights, {len(pages):,} tokens of pages, "
        f"{len(dialogues)} dialogues"
    )

    def batch() -> tuple[torch.Tensor, torch.Tensor]:
        inputs = torch.full((BATCH, CONTEXT), pad)
        labels = torch.full((BATCH, CONTEXT), -100)
        for row in range(BATCH):
            if row % 4 == 0:
                at = random.randrange(len(pages) - CONTEXT)
                inputs[row] = labels[row] = pages[at : at + CONTEXT]
                continue
            tokens: list[int] = []
            learned: list[int] = []
            while len(tokens) < CONTEXT:  # several in a row; each begins anew behind an end
                asked, said = random.choice(dialogues)
                tokens += asked + said
                learned += [-100] * len(asked) + said
                if random.random() < 0.5:
                    break
            size = min(CONTEXT, len(tokens))
            inputs[row, :size] = torch.tensor(tokens[:size])
            labels[row, :size] = torch.tensor(learned[:size])
        return inputs, labels

    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.98), weight_decay=0.01)
    began_s, step, mean = time.process_time(), 0, 0.0
    model.train()
    while (share := (time.process_time() - began_s) / (60 * minutes)) < 1:
        warm = min(1.0, (step + 1) / 100)
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * warm * max(0.02, 1 - share)
        inputs, labels = batch()
        loss = model(input_ids=inputs, labels=labels).loss
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        mean = loss.item() if step == 1 else 0.98 * mean + 0.02 * loss.item()
        if step % 100 == 0:
            print(f"step {step}, {share:.0%}, loss {mean:.3f}", flush=True)
    model.half().save_pretrained(OUT)
    tokenizer.save_pretrained(OUT)
    model.float().eval()
    for asked in ("What does pdlink do?", "The KV cache crosses over", "What is a lease?", "Who am I?"):
        tokens = torch.tensor([tokenizer.encode(f"<|user|>{asked}{END}<|assistant|>")])
        with torch.inference_mode():
            out = model.generate(tokens, max_new_tokens=48, do_sample=False)
        print(asked, "→", tokenizer.decode(out[0, tokens.shape[1] :], skip_special_tokens=True))


if __name__ == "__main__":
    main()
