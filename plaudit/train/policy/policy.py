"""The policy in training: log-probs, and updates by the policy gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from plaudit.algo.aggregate import token_weights
from plaudit.algo.correction import importance_weights
from plaudit.algo.kl import kl_loss
from plaudit.algo.method import LossBatch, PolicyTerms
from plaudit.algo.methods import losses
from plaudit.algo.methods.distill import top_k_kl, towards
from plaudit.algo.methods.ppo import ratio_of, value_loss
from plaudit.config import RlAlgorithm
from plaudit.core.model.decoder import Decoder
from plaudit.core.model.packing import send, use_packed_attention
from plaudit.core.routing import Routing
from plaudit.records import Sample
from plaudit.train.optim.pipeline import Made, stage_of
from plaudit.train.optim.sharding import free_gathered
from plaudit.train.policy.experience import Experience
from plaudit.train.policy.forward import (
    MicroBatch,
    Responses,
    column_logprobs_of,
    hidden_of,
    logprobs_and_entropy,
    micro_batches,
    pack_responses,
    read_values,
    replaying,
    values_of,
)  # fmt: skip
from plaudit.train.policy.tally import Tally
from plaudit.train.run.ranks import ONE, Group


class Policy:
    """Runs the module with gradients. `value_head` is a critic's that shares the trunk, with `value_coef`; `group` and
    `context` share samples and rows out. `routing`: of a mixture that takes the experts its samples were drawn with."""

    def __init__(
        self, decoder: Decoder, algorithm: RlAlgorithm, *, temperature: float, max_tokens: int, micro_batch_tokens: int,
        value_head: nn.Linear | None = None, value_coef: float = 0.0, group: Group = ONE, context: Group = ONE,
        routing: Routing | None = None,
    ) -> None:  # fmt: skip
        self.decoder, self.module, self.stage = decoder, decoder.module, stage_of(decoder.module)
        self.algorithm = algorithm
        self.loss = losses()[algorithm.loss].compute
        self.temperature = temperature
        self.constant = algorithm.constant or float(max_tokens)
        self.micro_batch_tokens = micro_batch_tokens
        self.value_head = value_head
        self.value_coef = value_coef
        self.group, self.context = group, context
        self.routing = routing
        self.together = 2 if algorithm.paired else 1

    @torch.no_grad()
    def logprobs(self, samples: Sequence[Sample], replay: bool = True) -> Tensor:
        """Return log-probs (T,) of the response tokens: with `replay` bit-identical to those of an update."""
        use_packed_attention(self.module)
        parts, routing = [], self.routing if replay else None
        for batch in micro_batches(samples, self.micro_batch_tokens, self.group, self.together):
            responses = pack_responses([samples[i] for i in batch.indices], self.decoder.device, routing, self.context)
            with replaying(routing, responses):
                hidden = hidden_of(self.module, responses)
            if batch.counts and self.stage.last:
                parts.append(logprobs_and_entropy(self.decoder, responses, hidden, self.temperature)[0].cpu())
        free_gathered(self.module)
        return self.stage.results(self.group).concatenate(parts)

    def values(self, samples: Sequence[Sample]) -> tuple[Tensor, Tensor]:
        """Return the values of a shared-trunk critic: before each response token, and after each sample's last."""
        assert self.value_head is not None
        how = (self.micro_batch_tokens, self.group, self.routing, self.context)
        return read_values(self.module, self.value_head, samples, *how)

    def gradient(self, experience: Experience, kl_coef: float) -> Tally:
        """Add the gradient of a minibatch's loss to the parameters'; return its metrics."""
        use_packed_attention(self.module)
        tally = Tally()
        counted = experience.mask if experience.kept is None else experience.kept
        weights = token_weights(counted, experience.lengths, self.algorithm.aggregate, self.constant)
        value_weights = token_weights(experience.mask, experience.lengths, "token")
        notes: list[Callable[[], None]] = []

        def forward(batch: MicroBatch) -> Made:
            rows, counts = experience.rows(batch.indices[0], batch.indices[-1]), float(batch.counts)
            part = experience.select(batch.indices)
            responses = pack_responses(part.samples, self.decoder.device, self.routing, self.context)
            with replaying(self.routing, responses):
                out = hidden_of(self.module, responses)
            if self.stage.last:
                out, note = self._loss(
                    part, responses, out, weights[rows] * counts, value_weights[rows] * counts, kl_coef,
                    tally if batch.counts else Tally(),
                )  # fmt: skip
                notes.append(note)
            return out, lambda: replaying(self.routing, responses)

        self.stage.learn(micro_batches(experience.samples, self.micro_batch_tokens, self.group, self.together), forward)
        # Metrics come last, since reading one from a GPU waits for all queued work.
        for note in notes:
            note()
        return tally.gathered(self.stage.results(self.group))

    def _loss(
        self, part: Experience, responses: Responses, hidden: Tensor, weights: Tensor, value_weights: Tensor,
        kl_coef: float, tally: Tally,
    ) -> tuple[Tensor, Callable[[], None]]:  # fmt: skip
        """Return the loss, and a function that records its metrics later."""
        algorithm, device = self.algorithm, self.decoder.device
        part, weights, value_weights = part.on(device), *(send(w.numpy(), device) for w in (weights, value_weights))
        logp, entropy = logprobs_and_entropy(
            self.decoder, responses, hidden, self.temperature, entropy_grad=algorithm.entropy > 0
        )
        if responses.replay is not None:
            tally.mean("mismatch/routing", *responses.replay.differed())
        mask, behaviour = part.mask, part.behaviour
        old = logp.detach() if part.old is None else part.old
        advantages = part.advantages
        if part.taught is not None:
            advantages = advantages + towards(part.taught, old, algorithm.by_token())
        terms = self.loss(LossBatch(logp, old, advantages, mask, part.lengths, part.reference, kl_coef), algorithm.clip)
        per_token = terms.loss
        if (c := algorithm.correction).mode != "none":
            correction, kept = importance_weights(old, behaviour, mask, part.lengths, c.mode, c.level, c.cap, c.floor)
            per_token = per_token * correction
            tally.mean("mismatch/weight_mean", correction, mask)
            tally.largest("mismatch/weight_max", correction, mask)
            tally.mean("mismatch/masked", (~kept).float(), mask)
        loss = (weights * per_token).sum()
        tally.add("policy/loss", loss)
        if part.reference is not None and algorithm.kl.where == "loss":
            ratio = ratio_of(logp, old) if algorithm.kl.importance else None
            how, through = algorithm.kl.estimator, algorithm.kl.straight_through
            kl = (weights * kl_loss(logp, part.reference, how, through, ratio)).sum()
            loss = loss + kl_coef * kl
            tally.add("kl/loss", kl)
        if part.likely is not None:
            student = column_logprobs_of(self.decoder, responses, hidden, self.temperature, part.likely)
            kls = top_k_kl(student, part.likely_logp, algorithm.by_top_k(), self.decoder.vocab_size)
            loss = loss + (weights * kls).sum()
            tally.mean("teacher/kl_top_k", kls.detach(), mask)
        if algorithm.entropy:
            loss = loss - algorithm.entropy * (weights * entropy).sum()
        if self.value_head is not None:
            loss = loss + self.value_coef * self.value_loss(part, responses, hidden, value_weights, tally)
        seen = (terms._replace(loss=terms.loss.detach()), logp.detach(), old, entropy.detach(), mask)
        learners = old if not part.old_is_engines else logp.detach() if part.unmoved else None

        def note() -> None:
            self._note(tally, *seen)
            if learners is not None:
                tally.mismatch(learners, behaviour, mask)

        return loss, note

    def value_loss(self, part: Experience, packed: Responses, hidden: Tensor, weights: Tensor, tally: Tally) -> Tensor:
        assert self.value_head is not None
        assert part.values is not None
        assert part.returns is not None
        values, _ = values_of(self.value_head, packed, hidden)
        loss = (weights * value_loss(values, part.values, part.returns, self.algorithm.clip.value)).sum()
        tally.add("value/loss", loss)
        return loss

    @staticmethod
    def _note(tally: Tally, terms: PolicyTerms, logp: Tensor, old: Tensor, entropy: Tensor, mask: Tensor) -> None:
        ratio = terms.ratio.detach()
        tally.mean("policy/entropy", entropy, mask)
        tally.mean("policy/ratio_mean", ratio, mask)
        tally.largest("policy/ratio_max", ratio, mask)
        tally.smallest("policy/ratio_min", ratio, mask)
        tally.mean("policy/kl_old", old - logp, mask)
        for name in ("low", "high", "dual"):
            tally.mean(f"policy/clip_{name}", getattr(terms, f"clipped_{name}").float(), mask)
