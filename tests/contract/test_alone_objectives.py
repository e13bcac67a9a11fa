"""The objectives' functions in loops written by hand."""

from __future__ import annotations

import torch
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from preheat.techniques.classification import compute_accuracy_and_f1, confusion_matrix, replace_head
from preheat.techniques.distillation import distillation_loss, hidden_distance
from preheat.techniques.preference import preference_loss


def _model(vocabulary: int = 32) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, vocab_size=vocabulary,
        tie_word_embeddings=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def _logp(model: LlamaForCausalLM, tokens: torch.Tensor, prompt: int) -> torch.Tensor:
    logp = model(tokens[:, :-1]).logits.log_softmax(-1).gather(2, tokens[:, 1:, None])[..., 0]
    return logp[:, prompt - 1 :].sum(1)


def test_alone_preference() -> None:
    policy, reference = _model(), _model()
    chosen, rejected = torch.randint(0, 32, (4, 10)), torch.randint(0, 32, (4, 10))
    rejected[:, :4] = chosen[:, :4]
    with torch.no_grad():
        beside = [_logp(reference, tokens, 4) for tokens in (chosen, rejected)]
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2)
    losses = []
    for _ in range(12):
        loss = preference_loss(
            _logp(policy, chosen, 4), _logp(policy, rejected, 4), *beside, loss="dpo", beta=0.1
        ).mean()
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    torch.testing.assert_close(losses[0], 0.6931472, rtol=1e-6, atol=0.0)  # ln 2: the policy is the reference
    assert losses[-1] < 0.5
    assert (_logp(policy, chosen, 4) - beside[0] > _logp(policy, rejected, 4) - beside[1]).all()


def test_alone_classification() -> None:
    model = _model()
    replace_head(model, 3)
    tokens, truth = torch.randint(0, 32, (12, 8)), torch.arange(12) % 3
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(30):
        loss = functional.cross_entropy(model(tokens).logits[:, -1], truth)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    found = compute_accuracy_and_f1(confusion_matrix(model(tokens).logits[:, -1].argmax(1), truth, 3))
    assert found == {"accuracy": 1.0, "macro_f1": 1.0}


def test_alone_distillation() -> None:
    student, teacher, tokens = _model(), _model(), torch.randint(0, 32, (8, 10))
    with torch.no_grad():
        for p in teacher.parameters():
            p.mul_(3.0)  # surer of what it says
    said = teacher(tokens, output_hidden_states=True)
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-2, weight_decay=0.0)
    losses, apart = [], []
    for _ in range(40):
        found = student(tokens, output_hidden_states=True)
        logits, theirs = found.logits.flatten(0, 1), said.logits.flatten(0, 1)
        losses.append(distillation_loss(logits, theirs, tokens.flatten(), mixture=1.0, temperature=2.0).mean())
        apart.append(hidden_distance(found.hidden_states[-1], said.hidden_states[-1].detach()).mean())
        optimizer.zero_grad()
        (losses[-1] + apart[-1]).backward()
        optimizer.step()
    assert losses[-1].item() < 0.2 * losses[0].item()
    assert apart[-1].item() < 0.5 * apart[0].item()
