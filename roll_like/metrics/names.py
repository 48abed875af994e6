"""What every metric is called, what it means and in which unit: one table for console, plots and docs.

A part in angle brackets stands for any text: `rollout/reward/<name>`, `eval/pass@<j>`. The first row that fits counts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True, slots=True)
class MetricInfo:
    """One row of the table.

    Attributes:
        name: Slash-separated name; `<part>` stands for any part.
        unit: Unit of the value; empty for a plain number.
        label: Short name for the console and for plots.
        description: What it says, in one sentence.
    """

    name: str
    unit: str
    label: str
    description: str


#: Name, unit (– for none), label, description; a backslash joins two lines.
_ROWS = """\
rollout/reward/mean | – | reward | Mean reward of the step's samples, before any KL penalty.
rollout/reward/std | – | reward spread | Standard deviation of the step's rewards.
rollout/reward/pass | share | pass | Share of groups in which at least one sample is right.
rollout/reward/<name> | – | <name> | Mean of one configured reward, unweighted.
rollout/source/<name>/reward | – | <name> | Mean reward of the samples of one data source.
rollout/agent/<name>/reward | – | <name> | Mean reward of one agent, in episodes of several.
rollout/verifiers/<name> | – | <name> | Mean of a reward or metric that verifiers reports.
rollout/domain/<name>/reward | – | <name> | Mean reward of the samples of one domain.
rollout/domain/<name>/response_length | tokens | <name> | Mean length of their responses.
rollout/domain/<name>/truncated | share | <name> | Share of them that the token limit cut.
rollout/domain/<name>/zero_variance | share | <name> | `rollout/groups/zero_variance` of its groups.
rollout/domain/<name>/groups | groups | <name> | Groups of one domain, rejected ones included.
rollout/tokens | tokens | tokens | Tokens that the policy sampled in the step.
rollout/samples | samples | samples | Scored samples of the step, those of rejected groups included.
rollout/failures | samples | failures | Samples that infrastructure lost; they are never trained on.
rollout/groups/accepted | groups | accepted | Groups that the step trains on.
rollout/groups/rejected | groups | rejected | Complete groups that a filter dropped.
rollout/groups/aborted | groups | aborted | Groups that were not needed; their tasks are attempted again.
rollout/groups/zero_variance | share | zero variance | Share of groups whose rewards and used step scores are all equal.
rollout/response_length/mean | tokens | length | Mean number of sampled tokens of a response.
rollout/response_length/max | tokens | longest | Longest response of the step.
rollout/truncated | share | truncated | Share of responses, or episodes, that a limit cut.
rollout/kept/mean | tokens | kept | Tokens that `top_p`, `top_k` and `min_p` left, where they left some out.
rollout/kept/max | tokens | most kept | The most that they left, where they left some out.
rollout/images/mean | images | images | Mean number of images among a sample's tokens, where it has some.
rollout/images/tokens | tokens | image tokens | Mean number of its tokens that stand for images, where it has some.
rollout/speculation/accepted | share | guesses accepted | Share of guessed tokens accepted, of all requests.
rollout/speculation/length | tokens | tokens a pass | Mean tokens of a pass that checks guesses, of all requests.
rollout/success | share | success | Share of episodes that were solved, where environments say so.
rollout/turns | turns | turns | Mean number of the policy's turns in an episode.
rollout/cuts | – | cuts | How often the chat template rewrote history, a mean over episodes.
rollout/conversations | – | conversations | Conversations that an agent program held, a mean over episodes.
rollout/ignored_options | – | ignored | Requests of an agent program with options that are ignored, a mean.
rollout/consensus/share | share | agreement | Mean share of a group's samples with its most frequent answer.
rollout/consensus/label_accuracy | share | label accuracy | Share of samples whose group's most common answer is right.
rollout/consensus/reward_accuracy | share | reward accuracy | Share of samples rewarded as the reference answer would.
rollout/reference_likelihood/placed | share | placed | Share of responses with a place for the reference answer.
rollout/reference_likelihood/without_reasoning | – | without reasoning | The same likelihood without any reasoning.
rollout/<name> | – | <name> | Mean of a figure that a reward reports beside its value.
curriculum/attempted | tasks | attempted | Tasks that a curriculum had attempted since the step before.
curriculum/passed_by | share | passed by | Share of the tasks whose turn came that the curriculum let pass by.
curriculum/solve_rate | share | known rate | Mean solve rate so far of the attempted tasks that were measured before.
curriculum/measured | share | measured | Tasks with a group that has ended, as a share of all.
curriculum/hard | share | hard | Share of all tasks whose solve rate is below the curriculum's `low`, else 0.05.
curriculum/easy | share | easy | Share of all tasks whose solve rate is above its `high`, else 0.95.
curriculum/stage | – | stage | Stage of the curriculum `stages`, from 0.
train/perplexity | – | perplexity | Exponential of the mean loss of a trained token, before the step.
train/samples | samples | samples | Given samples that the step trains on.
train/loss | – | loss | The objective that is minimised: policy loss and penalties.
train/policy_loss | – | policy loss | The policy's part of the loss.
train/kl | nats/token | kl | Distance from the reference model, by the configured estimator.
reference/last_sync | step | reference of step | Step after which a reference that follows moved last; 0: none.
reference/distance | – | moved by | Root mean square of what policy and reference differ by in weights, before it moves.
teacher/last_sync | step | teacher of step | The same of a policy's own teacher.
teacher/distance | – | moved by | The same of a policy's own teacher.
train/kl_loss | – | kl loss | The KL penalty's part of the loss.
train/distillation_loss | – | distillation loss | The part of the loss that compares distributions with a teacher's.
train/old_kl | nats/token | old kl | Distance from the policy at the start of the step (k3).
train/entropy | nats/token | entropy | Entropy of the policy over sampled positions.
train/ratio | – | ratio | Mean probability ratio of the policy to the old policy.
train/clip_fraction | share | clipped | Share of tokens whose gradient the loss clipped.
train/clip_fraction_high | share | clipped high | Share of tokens with a positive advantage, clipped above.
train/clip_fraction_low | share | clipped low | Share of tokens with a negative advantage, clipped below.
train/clip_fraction_dual | share | clipped dual | Share of tokens that the dual clip bounds.
train/covariance_fraction | share | penalised | Share of tokens that `clip_cov` leaves out or `kl_cov` penalises.
demonstrations/groups | share | demonstrated | Share of the groups that a demonstration has joined.
demonstrations/reward | – | their reward | Mean reward of the demonstrations in groups, as the run's rewards score them.
demonstrations/failures | samples | not scored | Demonstrations that a reward failed on; groups go on without them.
demonstrations/tokens | tokens | demonstrated | Tokens of demonstrations in groups.
demonstrations/probability | – | their probability | Mean probability of these tokens under the policy.
demonstrations/cross_entropy | nats/token | cross-entropy | Mean of −log π of supervised tokens of demonstrations.
demonstrations/sft_probability | – | their probability | Mean probability of these tokens under the policy.
demonstrations/sft_tokens | tokens | supervised | Tokens of demonstrations with a supervised loss.
replay/groups | share | replayed | Share of the groups that a right answer of an earlier step has joined.
replay/age | versions | age | Policy versions since replayed answers were sampled, a mean.
replay/ratio | – | replay ratio | Mean ratio of the policy to that which sampled a replayed token.
replay/kept | answers | kept | Right answers that are kept for later steps.
train/off_policy_loss | – | off-policy loss | The part of the loss of demonstrations in groups.
train/sft_loss | – | sft loss | The supervised loss on demonstrations, before its coefficient.
train/sft_coefficient | – | sft weight | Weight of the supervised loss on demonstrations in the step.
train/observation_loss | – | observation loss | With `algorithm.observation_coefficient`: its part of the loss.
train/observation_cross_entropy | nats/token | observations | Mean of −log π of what the policy reads between its turns.
train/loss_weight | – | weight | Mean weight that `vespo` gives a token's gradient; 1 on policy.
train/kl_coefficient | – | kl weight | Coefficient of the KL penalty in the step.
train/grad_norm | – | grad norm | Global gradient norm before clipping; not finite where an update was skipped.
train/lr | – | lr | Learning rate of the last optimizer step.
train/preference_loss | – | preference loss | The pairs' (or samples') part of a preference loss.
train/center_loss | – | center loss | The part of a reward model's loss that keeps scores around 0, weighted.
train/nll_loss | – | nll loss | The part of the chosen responses' negative log-likelihood, weighted.
train/updates | updates | updates | Optimizer steps.
train/recomputed_updates | updates | recomputed | Those whose gradient was finite only when computed again.
train/skipped_updates | updates | skipped | Updates not taken: their gradient was twice not finite.
train/tokens | tokens | trained | Sampled tokens that the loss applies to.
train/computed_tokens | tokens | computed | Tokens of the forward and backward passes, padding included.
train/padding_tokens | tokens | padding | Tokens computed only because micro-batches are rectangular.
train/padding_fraction | share | padding | Padding as a share of the computed tokens.
train/router_disagreement | share | other experts | With `algorithm.router_replay`: share of the engine's experts \
that the trainer would not have chosen.
train/<name> | – | <name> | A further figure of the trainer.
preference/reward_chosen | – | chosen | Mean implicit reward of chosen, or desirable, responses; scaled by β.
preference/reward_rejected | – | rejected | The same of rejected, or undesirable, ones.
preference/reward_margin | – | margin | Mean difference of the rewards of a pair, or of both kinds.
preference/margin | – | margin | Mean difference of a reward model's scores of a pair.
preference/score_chosen | – | chosen | Mean score of chosen responses by a reward model; of single answers, of those \
labelled above ½.
preference/score_rejected | – | rejected | The same of rejected ones, or of those labelled below ½.
preference/score | – | score | Mean score of single answers by a reward model.
preference/error | – | error | Mean distance of a reward model's score from the given one; with `bce`, of σ(score).
preference/accuracy | share | accuracy | Share of pairs whose chosen response has the higher reward (of samples: on \
its side of the baseline, or of ½); ties ½.
preference/pair_accuracy | share | pair accuracy | Share of pairs whose chosen answer has the higher reward, if a \
loss on single samples is measured on pairs.
preference/logprob_chosen | nats | logprob chosen | Mean log-probability of chosen responses, summed up.
preference/logprob_rejected | nats | logprob rejected | The same of rejected ones.
preference/length_chosen | tokens | length chosen | Mean number of tokens of chosen responses.
preference/length_rejected | tokens | length rejected | The same of rejected ones.
preference/baseline | – | baseline | KL baseline of `kto`, scaled by β.
preference/pairs | pairs | pairs | Pairs that the step trained on.
preference/samples | samples | samples | Unpaired samples that the step trained on.
preference/steps | steps | steps | Labelled steps of answers that the optimizer step trained on.
preference/positive | share | positive | Share of single answers, or of steps, that are labelled above ½.
preference/auc | share | AUC | Probability that an answer labelled above ½ scores higher than one labelled below; \
ties ½.
preference/rank_correlation | – | rank correlation | Spearman's correlation of a reward model's scores with the given \
ones.
preference/first_wrong | share | first wrong | Share of answers with a wrong step whose first wrong step is found.
preference/none_wrong | share | none wrong | Share of answers without a wrong step in which none is found.
preference/first_wrong_f1 | share | first wrong F1 | Harmonic mean of the two, as in ProcessBench.
preference/<name> | – | <name> | A further figure of preference training.
iteration/number | – | iteration | Which iteration of sampled pairs the step begins, counted from 1.
iteration/steps | steps | steps | Steps that the iteration lasts.
iteration/pairs | pairs | pairs | Pairs that its groups of answers gave.
iteration/without_pair | share | no pair | Share of its groups that gave none: rewards too close, or lost.
iteration/unscored | groups | unscored | Its groups with fewer than two scored answers; the rest was lost.
iteration/margin | – | reward gap | Mean difference of the rewards of its pairs.
iteration/chosen_truncated | share | cut | Share of its pairs whose chosen answer the token limit cut.
iteration/<name> | – | <name> | A further figure of an iteration of sampled pairs.
distill/divergence | nats/token | divergence | Mean of the configured divergence of student and teacher.
distill/kl | nats/token | forward kl | KL divergence from teacher to student, at the loss's temperature.
distill/cross_entropy | nats/token | cross-entropy | Of the student, with the data's own tokens.
distill/top1_agreement | share | agreement | Tokens for which both find the same token most likely.
distill/teacher_entropy | nats/token | teacher entropy | Entropy of the teacher, at the loss's temperature.
distill/teacher_mass | share | teacher mass | Mass of the teacher's distribution that its top-k covers.
distill/unmatched | – | unmatched | Rank distance of tokens that only one of two vocabularies has.
distill/reverse_kl | nats/token | reverse kl | Mean of log π − log π_teacher over the student's own tokens.
distill/<name> | – | <name> | A further figure of distillation.
critic/loss | – | critic loss | Clipped squared error of the critic's values, halved.
critic/clip_fraction | share | values clipped | Share of tokens whose value the loss kept from moving on.
critic/value_mean | – | value | Mean value of the step's sampled tokens, before the critic learns from them.
critic/return_mean | – | return | Mean return that these values should have been.
critic/explained_variance | – | explained | 1 − Var(return − value)/Var(return) before the update; at most 1.
critic/grad_norm | – | critic grad norm | Global gradient norm of the critic before clipping.
critic/lr | – | critic lr | Learning rate of the critic's last optimizer step.
critic/recomputed_updates | updates | recomputed | As `train/recomputed_updates`, of the critic.
critic/skipped_updates | updates | skipped | As `train/skipped_updates`, of the critic.
critic/<name> | – | <name> | A further figure of the critic.
mismatch/kl | nats/token | mismatch | KL between the inference engine's and the trainer's log-probabilities.
mismatch/logprob_difference | nats | mismatch | Mean absolute difference of the same log-probabilities.
mismatch/logprob_difference_max | nats | mismatch max | Largest absolute difference of them.
mismatch/kl_k1 | nats/token | mismatch k1 | The same divergence by its unbiased estimator, the log-ratio.
mismatch/ratio_p01 | – | ratio p1 | 1 % quantile of the trainer's to the engine's probability of a token.
mismatch/ratio_p50 | – | ratio median | Median of that ratio.
mismatch/ratio_p99 | – | ratio p99 | 99 % quantile of that ratio.
mismatch/logprob_pearson | – | pearson | Correlation of the engine's and the trainer's log-probabilities.
sync/probe | nats | probe | Mean difference of engine's and trainer's log-probabilities of fixed tokens.
sync/sent_bytes | bytes | sent | What weight syncs of the step sent to each engine.
sync/changed_share | share | changed | Share of the weights that differed from those sent before, where compared.
mismatch/<name> | – | <name> | A further figure of that difference, or of its correction.
correction/weight | – | weight | Mean importance weight of the correction for that difference.
correction/capped_fraction | share | capped | Share of tokens whose importance weight was out of bounds.
correction/rejected_fraction | share | rejected | Share of tokens that the correction leaves out.
correction/ess | share | ess | Effective sample size of the importance weights.
correction/<name> | – | <name> | A further figure of the correction.
reward/shaped | – | shaped reward | Mean reward after shaping, before advantages.
reward/truncated | – | truncated | Mean change of the reward by `reward_shaping.truncated`.
reward/overlong | – | overlong | Mean change of the reward by the punishment of over-long responses.
reward/length | – | length penalty | Mean change of the reward by the length penalty.
reward/kl | nats/token | kl | Distance from the reference model that the reward is reduced by.
reward/<name> | – | <name> | A further figure of rewards on their way to advantages.
advantage/mean | – | advantage | Mean advantage of the trained tokens.
advantage/std | – | advantage spread | Their standard deviation.
advantage/max | – | largest advantage | The largest of them.
advantage/min | – | least advantage | The least of them.
advantage/baseline/<name> | – | <name> | Running mean reward of one role of an environment, which `rae` compares with.
mask/difficulty | share | off band | Share of samples left out because their group is too easy or too hard.
mask/truncated | share | cut | Share of samples left out because a limit cut them.
mask/samples_per_group | share | extra samples | Share of samples left out because others of their group are enough.
staleness/mean | versions | staleness | Mean age of trained samples: versions since their oldest token.
staleness/max | versions | stalest | Largest such age; with `schedule: async` at most `max_staleness`.
staleness/tokens | versions | token age | Mean age of trained tokens, each since its own version.
staleness/mixed | share | mixed | Share of trained samples that more than one policy version sampled.
staleness/group_range | versions | group range | Mean difference of the newest and oldest version of a group.
staleness/<name> | versions | <name> | A further figure of the age of samples.
schedule/ready | groups | ready | Groups that wait to be trained, when the step had its own.
schedule/open | groups | open | Groups that are sampled or scored at that moment.
schedule/filtered | groups | filtered | Groups that the filter turned down since the last step.
schedule/discarded | groups | discarded | Groups of a checkpoint that were too old to be trained.
schedule/off_policy | share | off-policy | Share of trained samples with tokens of an earlier version.
schedule/<name> | – | <name> | A further figure of the rollout schedule.
eval/avg | – | eval | Mean reward over all samples of the evaluation tasks (avg@k); without `evaluation.sources` the \
mean of the benchmarks' scores.
eval/pass@<j> | share | eval pass@<j> | Share of tasks that at least one of j samples solves (unbiased), for j = 1, \
2, 4, … and k, over evaluation tasks with k scored samples.
eval/maj@<k> | share | eval maj@<k> | Share of the same tasks whose most frequent answer among k is right (majority \
vote), where a reward compares answers.
eval/reward/<name> | – | <name> | Mean of one configured reward over the evaluation's samples.
eval/agent/<name>/avg | – | <name> | Mean reward of one agent in the evaluation, in episodes of several.
eval/verifiers/<name> | – | <name> | Mean of a reward or metric that verifiers reports in the evaluation.
eval/domain/<name>/avg | – | <name> | Mean reward of one domain in the evaluation.
eval/domain/<name>/pass@<j> | share | <name> | `eval/pass@<j>` over the tasks of one domain.
eval/domain/<name>/maj@<k> | share | <name> | `eval/maj@<k>` over the tasks of one domain.
eval/response_length | tokens | eval length | Mean response length in the evaluation.
eval/failures | samples | eval failures | Answers of the evaluation that infrastructure lost.
eval/incomplete_tasks | tasks | incomplete | Tasks with fewer than k scored samples; pass@j and maj@k omit them.
eval/truncated | share | eval truncated | Share of the evaluation's responses that the token limit cut.
eval/accuracy | share | eval accuracy | Share of the evaluation's pairs whose chosen answer is preferred (of samples: \
on its side of the baseline, or of ½).
eval/pair_accuracy | share | eval pair accuracy | Share of the evaluation's pairs whose chosen answer is preferred, \
by a loss on single samples.
eval/reward_margin | – | eval margin | Mean difference of the implicit rewards of the evaluation's pairs, or \
desirable and undesirable samples.
eval/baseline | – | eval baseline | KL baseline of `kto` over the evaluation's answers, scaled by β.
eval/margin | – | eval margin | Mean difference of a reward model's scores of the evaluation's pairs.
eval/auc | share | eval AUC | Probability that an answer of the evaluation labelled above ½ scores higher than one \
labelled below; ties ½.
eval/rank_correlation | – | eval rank correlation | Spearman's correlation of scores with the given ones in the \
evaluation.
eval/error | – | eval error | Mean distance of a reward model's score from the given one in the evaluation; with \
`bce`, of σ(score).
eval/positive | share | eval positive | Share of the evaluation's answers, or steps, that are labelled above ½.
eval/first_wrong | share | eval first wrong | Share of the evaluation's answers with a wrong step whose first one is \
found.
eval/none_wrong | share | eval none wrong | Share of its answers without a wrong step in which none is found.
eval/first_wrong_f1 | share | eval first wrong F1 | Harmonic mean of the two, as in ProcessBench.
eval/loss | nats/token | eval loss | Mean negative log-likelihood of the evaluation's answers, or its preference loss.
eval/perplexity | – | eval perplexity | Its exponential.
eval/tokens | tokens | eval tokens | Tokens of the evaluation's answers.
eval/source/<name>/loss | nats/token | <name> | The evaluation's loss on one data source.
eval/kl | nats/token | eval kl | KL divergence from teachers to student on the evaluation's answers.
eval/top1_agreement | share | eval agreement | Share of their tokens that both find the likeliest.
eval/reverse_kl | nats/token | eval reverse kl | Mean of log π − log π_teacher over the student's answers.
eval/success | share | eval success | Share of the evaluation's episodes that were solved.
eval/base/<name> | – | base <name> | The same figure of the model without adapters (`evaluation.base_model`), sampled \
at the first evaluation.
eval/adapter/<adapter>/<name> | – | <adapter> <name> | The same figure of a further adapter (`evaluation.adapters`), \
sampled at the first evaluation.
eval/benchmark/<benchmark>/<name> | – | <benchmark> <name> | The same figure of a benchmark (`evaluation.benchmarks`); \
`reward/<grader>` is a grader's mean.
eval/benchmarks | – | benchmarks | Mean of the scores (`avg`) of all benchmarks; not there if one lost all its answers.
eval/<name> | – | <name> | A further figure of an evaluation.
time/step | s | step | Wall time of the whole step.
time/generate | s | generate | Time in which the inference engines generated.
time/engines | s | engines | Time in which engines had requests (frozen ones too), a mean over them.
time/reward | s | reward | Time spent on rewards beyond generation.
time/blocked | s | blocked | Time in which no group ran, because none could be admitted.
time/teachers | s | teachers | Time of the teachers' forward passes.
time/logprobs | s | log-probs | Time of the reference model's forward passes.
time/critic | s | critic | Time of the critic: values and updates; a part of the trainer's.
time/train | s | train | Time of the trainer.
time/old_logprobs | s | old log-probs | The part of the trainer's time that goes to old log-probabilities.
time/train_compute | s | compute | Time of the slowest training rank for its updates; the rest is overhead.
time/sync | s | sync | Time of sending weights to the inference engines, checks included.
time/offload | s | offload | Time in which models move between GPUs that they share and host memory.
time/sleep | s | sleep | Time in which engines free the memory of shared GPUs, or take it back.
time/evaluate | s | evaluate | Time of an evaluation; logged with it, no part of a step.
time/idle | s | idle | The step's time that none of the timers covers.
time/<name> | s | <name> | Time of another part of the step.
util/engines | share | engines busy | `time/engines` as a share of the step's wall time.
util/trainer_wait | share | trainer waits | Share of the time since the last step in which training waited.
util/trainer_mfu | share | MFU | Model FLOPs utilisation in training: `throughput/trainer_tflops` over the GPU's \
documented peak rate.
util/critic_mfu | share | critic MFU | The same of the critic.
util/<name> | share | <name> | A further share of time that something is used.
throughput/tokens_per_second | tokens/s | tokens/s | Tokens sampled, or given and trained on, over the step's wall time.
throughput/samples_per_second | samples/s | samples/s | Samples of the step over its wall time.
throughput/tokens_per_second_per_device | tokens/s | tokens/s a device | `throughput/tokens_per_second` over all \
devices of the run: GPUs, or CPU cores.
throughput/trainer_tflops | TFLOP/s | trainer TFLOP/s | Model FLOPs of forward and backward passes over the time of a \
training rank, optimizer included.
throughput/critic_tflops | TFLOP/s | critic TFLOP/s | The same of the critic.
throughput/<name> | – | <name> | A further rate.
checkpoint/stall_seconds | s | checkpoint stall | Time that the run stood still for the state that was kept in \
memory, or written, before the step.
checkpoint/age_seconds | s | checkpoint age | Age of the last checkpoint on disk, or time since the start.
health/hangs/<role> | workers | <role> hangs | Workers of a role that hung and were killed since the last step; \
logged when there are some.
health/restarts/<role> | restarts | <role> restarts | How often workers of a role were replaced since the last step; \
logged when they were.
health/recovery_seconds | s | recovery | Longest time from a failure until its workers were replaced.
health/steps_replayed | steps | steps computed again | Steps that a restarted trainer computed again, from its \
checkpoint to where it was.
health/rewinds | rewinds | rewinds | Steps that were left out, because gradients were not finite; the models went \
back to a checkpoint.
service/sessions | sessions | sessions | Clients of a training service that are there.
service/models | models | models | Their models.
service/queue | requests | queue | Requests that are not done, samples included.
service/train_tokens_per_second | tokens/s | trained | Tokens that the service trained on since the last line.
service/sampled_tokens_per_second | tokens/s | sampled | Tokens that it sampled since the last line.
service/requests | requests | requests | Requests that were done since the service started, failed ones included.
service/failed_requests | requests | failed | Those of them that failed.
share/<name> | share | <name> | `time/<name>` as a share of the step; phases may overlap.
memory/rss_gib | GiB | memory | Resident memory of all processes of the run; shared pages count in each.
memory/<role>_gpu_gib | GiB | <role> GPU | Largest peak of allocated GPU memory so far among a role's processes, as \
PyTorch counts it.
memory/<role>_gib | GiB | <role> | Largest resident memory of a role's processes (`trainer`, `inference`, \
`reference`, `critic`, `teacher_NAME`, …) since the step before, added up; pages that they share count in each.
"""

#: Parts of a step that are drawn: colours in a terminal and in figures.
TIMERS: dict[str, tuple[str, str]] = {
    "time/generate": ("green", "#2a9d8f"),
    "time/reward": ("magenta", "#9b5de5"),
    "time/teachers": ("magenta", "#f4845f"),
    "time/logprobs": ("cyan", "#48cae4"),
    "time/train": ("blue", "#3a6ea5"),
    "time/sync": ("yellow", "#e9c46a"),
    "time/evaluate": ("bright_green", "#8ab17d"),
    "time/idle": ("bright_black", "#d9d9d9"),
}
#: Those whose shares of a step are shown; an evaluation is no part of one.
STEP_PHASES = tuple(name for name in TIMERS if name != "time/evaluate")

METRICS = tuple(MetricInfo(*row.replace("| – |", "|  |", 1).split(" | ")) for row in _ROWS.splitlines())
_EXACT = {info.name: info for info in METRICS if "<" not in info.name}
_PATTERNS = tuple(
    (re.compile(re.sub(r"<(\w+)>", r"(?P<\1>.+)", re.escape(info.name))), info) for info in METRICS if "<" in info.name
)


def without_smaller_passes(names: Iterable[str]) -> list[str]:
    """Return names without `eval/pass@j` for any j but the largest, for views with room for one.

    >>> without_smaller_passes(["eval/avg", "eval/pass@1", "eval/pass@2", "eval/pass@4"])
    ['eval/avg', 'eval/pass@4']
    """
    names = list(names)
    passes = [name for name in names if name.startswith("eval/pass@")]
    largest = max(passes, key=lambda name: int(name.rpartition("@")[2]), default="")
    return [name for name in names if name not in passes or name == largest]


@lru_cache(maxsize=1024)
def is_listed(name: str) -> bool:
    """Return whether the table has a row for exactly this metric, and not only for its kind."""
    return name in _EXACT


def metric_info(name: str) -> MetricInfo:
    """Return what is known of a metric; one that is not in the table gets its own name as label.

    >>> metric_info("rollout/reward/ifeval").label
    'ifeval'
    >>> metric_info("eval/pass@4").label
    'eval pass@4'
    >>> metric_info("mine/widgets").label
    'mine/widgets'
    """
    if name in _EXACT:
        return _EXACT[name]
    for pattern, info in _PATTERNS:
        match = pattern.fullmatch(name)
        if match:
            label = info.label
            for part, text in match.groupdict().items():
                label = label.replace(f"<{part}>", text)
            return MetricInfo(name, info.unit, label, info.description)
    return MetricInfo(name, "", name, "")
