"""`tiny`: a Mixture of Experts of 0.2 M parameters, trained in seconds, for tests and first tries."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

from tasks.console import track
from tasks.params import Tiny
from tasks.sources.synthetic import DOMAINS, documents

VOCABULARY = 1024
SEQUENCE = 128  # tokens
BATCH = 16  # sequences, the same number from each domain
DOCUMENTS = 700  # per domain
LEARNING_RATE = 6e-3
# Requests and calibration take other seeds (>= 0): a training row is never a request row.
TRAINING_SEED = -1
BOS, EOS = 0, 1


def build(folder: Path, params: Tiny) -> dict[str, float]:
    """Train the model and write it with its tokenizer to `folder`; returns what metrics should know.

    Qwen3-MoE, 2 layers, hidden 64, 8 experts of width 32, top-2. Bit-identical for equal seeds and threads.
    """
    texts = {domain: documents(domain, DOCUMENTS, TRAINING_SEED - params.seed) for domain in DOMAINS}
    tokenizer = train_tokenizer([text for domain in DOMAINS for text in texts[domain][:200]])
    corpus = {domain: _packed(tokenizer, texts[domain]) for domain in DOMAINS}
    with torch.random.fork_rng():
        torch.manual_seed(params.seed)
        model = Qwen3MoeForCausalLM(configuration())
    loss = _train(model, corpus, params)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return {"training_nll": loss, "training_tokens": params.steps * BATCH * SEQUENCE}


def configuration() -> Qwen3MoeConfig:
    return Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        tie_word_embeddings=True,
        max_position_embeddings=1024,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=EOS,
        router_aux_loss_coef=0.01,
    )


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of `VOCABULARY` tokens: reads any text, adds no special token by itself."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|bos|>", "<|eos|>"],  # the ids BOS and EOS
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|bos|>", eos_token="<|eos|>", pad_token="<|eos|>"
    )


def _packed(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> torch.Tensor:
    """The texts, each between bos and eos, cut into sequences [N, SEQUENCE]; the rest is left out."""
    ids: list[int] = []
    for encoded in tokenizer(texts)["input_ids"]:
        ids += [BOS, *encoded, EOS]
    count = len(ids) // SEQUENCE
    return torch.tensor(ids[: count * SEQUENCE]).view(count, SEQUENCE)


def _train(model: Qwen3MoeForCausalLM, corpus: dict[str, torch.Tensor], params: Tiny) -> float:
    """AdamW with a warm-up and a linear decay; returns the mean loss of the last ten steps in nats."""
    generator = torch.Generator().manual_seed(params.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.05)
    model.train()
    losses: list[float] = []
    share = BATCH // len(corpus)
    for step in track(range(params.steps), "training", params.steps):
        rows = [
            part[torch.randint(len(part), (share,), generator=generator)]
            for _, part in sorted(corpus.items())
        ]
        batch = torch.cat(rows)
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1, (step + 1) / 20) * (1 - 0.95 * step / params.steps)
        output = model(input_ids=batch, labels=batch, output_router_logits=True)  # with the balancing loss
        optimizer.zero_grad(set_to_none=True)
        output.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(float(output.loss.detach() - model.router_aux_loss_coef * output.aux_loss.detach()))
    model.eval()
    return sum(losses[-10:]) / len(losses[-10:])
