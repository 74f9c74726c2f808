"""The blocks of a study's page, in their order. A figure is shown and stored because it stands here."""

from __future__ import annotations

from matplotlib.figure import Figure

from analysis.report import figures
from analysis.report.blocks import Block, Frames, drawn_from
from analysis.report.fidelity import signal_figures
from analysis.report.fidelity.sentences import paper_estimator
from jagg_core.records import Record


def _per_group(record: Record, frames: Frames) -> dict[str, Figure]:
    table = frames["per_group"]
    windows = record.settings["windows"] if len(table) else ()
    return {f"cosine_per_group_w{window}": figures.cosine_per_group(table, window) for window in windows}


def _signal(record: Record, frames: Frames) -> dict[str, Figure]:
    drawn = {}
    if len(frames.get("signal", ())) and frames["signal"]["loss"].notna().any():
        drawn["signal_cost"] = signal_figures.signal_per_cost(frames["signal"], record.settings["update_samples"])
    if len(frames.get("by_batch", ())):
        drawn["signal_batch"] = signal_figures.loss_by_batch(frames["by_batch"], record.settings["max_signal_loss"])
    return drawn


MEASURED = Block(
    "How it was measured",
    before=(
        "Every way of computing the update gradient of GRPO is a plan: some trained steps are differentiated (one "
        "pass each), and the upstream gradients of all steps are spread over them. This page compares plans with the "
        "exact gradient ({{ record.schedule | length }} passes) on rollouts of a trained model, and times them. "
        "Intervals are 95 % intervals over n rollout batches: of means by Student's t (of cosines on the scale of "
        "log(1 - cosine)), of the learning signal by a bootstrap widened for n; from fewer than 8 batches nothing is "
        "claimed. Each batch holds {{ record.settings.recipe.prompts }} prompts with {{ "
        "record.settings.recipe.samples }} samples, and its advantages are centred per prompt. Knots were searched on "
        "calibration batches and judged on others. Every recommendation is the end of a sequence of tests from many "
        "passes to few, so that looking at many plans needs no correction; plans with equally many passes share the "
        "error of one test."
    ),
    note=(
        "The paper does not state its window and number of steps: W = 4 with {{ record.schedule | length }} trained "
        'steps and jagg_frac {{ record.settings.jagg_frac }} is inferred from its figures. "Looks ahead" means that '
        "some step's upstream gradient is put on a later state, which already contains that step's noise."
    ),
)

STUDY = (
    Block("Cells that failed", "failures", opened=True),
    Block(
        "Whole update",
        "whole_update",
        drawn_from("pareto", "pareto", lambda record, table: figures.pareto_front(table, paper_estimator(record))),
        note=(
            "Means over batches. Subsampling is averaged over 16 random subsets, drawn for each batch anew. "
            "The paper's rule is drawn at its best of every W and fraction for each number of passes. The "
            "relative error and norm ratio stand next to the cosine because it is blind to scale."
        ),
        opened=True,
    ),
    Block("Group by group", "per_group", _per_group, folded=True),
    Block(
        "How much may be approximated",
        "routing",
        note=(
            "The largest leading share of groups in which every group's mean cosine under the paper's rule is "
            "at least the threshold."
        ),
    ),
    Block(
        "Learning signal",
        "signal",
        _signal,
        before=(
            "What an update learns from is the part of its gradient that points along the expected policy "
            "gradient. The signal of an estimator is the cosine of its gradient on one rollout batch to the "
            "mean of the other batches' exact gradients; the difference to exact is paired, on the same "
            "rollouts. The loss is the share of exact's signal that is lost in an update of {{ "
            "record.settings.update_samples }} samples, extrapolated by noise that falls with the number of "
            "samples while bias does not; a batch here has {{ record.settings.signal_prompts * "
            'record.settings.signal_samples }}. It may be negative. A loss is "kept" if its interval lies '
            'below {{ record.settings.max_signal_loss }}, "lost" if above.'
        ),
        note=(
            "Estimators that are there for comparison only are measured on the first {{ "
            "record.settings.contender_batches }} batches: their signal is not comparable with that of exact "
            "on all {{ record.settings.signal_batches }}; differences and losses are, for they are taken on "
            "the same batches."
        ),
    ),
    Block(
        "What causal plans lose of the expected gradient",
        "pathwise",
        before=(
            "Pathwise gradients carry the reward's own gradient back along the rollout. Under a plan that does not "
            "look ahead they have the policy gradient's expectation and far less noise, so they tell the bias of "
            'causal plans from few samples. "Direction lost" is 1 - cosine^2 of the expected gradients of plan and '
            'exact, from inner products of different batches only. "Signal of one batch" is the share of a batch\'s '
            'squared norm that is its mean\'s. "Loss in the update" joins these means with the noise of the policy '
            "gradient itself; the estimate by the score function alone, from other batches, stands next to it as a "
            'check. The signal is "kept" if direction lost and loss in the update both lie below '
            "{{ record.settings.max_signal_loss }}. Intervals are by the jackknife over batches and Student's t. Plans "
            "that look ahead are left out: their expected gradient has one more term, the leak, which pathwise "
            "gradients do not see."
        ),
    ),
    Block(
        "Is one plan better than another?",
        "pairs",
        before=(
            "Share of exact's signal that a plan keeps in an update of {{ record.settings.update_samples }} "
            "samples, minus what the other plan keeps, from the same batches. Where the interval includes "
            "0 the better one is not known; the last column says how many more samples of rollouts "
            "would decide it, if the difference stays what it is and intervals shrink with the root of their "
            "number. With so many pairs a few are decided by chance."
        ),
        folded=True,
    ),
    Block(
        "Signal kept per cost",
        "signal_cost",
        note=(
            "Costs are shares of exact's: by passes (a backward counts as two forwards, upstream gradients in "
            "closed form), and as measured in interleaved rounds on this machine, by a line through the times "
            "of exact and of the causal plans. A step is rollout, reward and update."
        ),
    ),
    Block(
        "Bias under other centrings of the advantages",
        "centring",
        note=(
            "Squared bias relative to the squared expected gradient, then the paired difference of the signal "
            'to exact\'s. "all 1": squared mean gradient over the noise power of a batch, |mu|^2 / V, when '
            "rewards say nothing; 0 is no leak."
        ),
    ),
    Block(
        "Past and future",
        draw=drawn_from("cross", "cross", lambda record, table: figures.past_and_future(table)),
        note=(
            "A step's loss gradient, taken through the network at another state of the rollout: below the "
            "diagonal at an earlier one, above it at a later one, which already contains the step's noise. "
            "Dark: close to the step's own gradient. Causal plans use what lies below."
        ),
    ),
    Block(
        "Where the knots lie",
        draw=drawn_from("knots", "knots", lambda record, table: figures.knot_placement(table, record.schedule)),
    ),
    Block(
        "Block by block",
        "blocks",
        drawn_from("blocks", "blocks", lambda record, table: figures.block_heat_map(table)),
        folded=True,
    ),
    Block(
        "Shipped calibrations side by side",
        "side_by_side",
        note=(
            "Stored results of <code>python -m analysis calibrate</code> on every backbone that ships, at "
            "this eta and schedule: the share of groups that the paper's rule may approximate, held-out "
            "cosines of causal plans, and the passes that each calibration recommends (empty: it names no "
            "plan for this target)."
        ),
    ),
    Block(
        "Leak: does the mean gradient vanish when rewards say nothing?",
        "leak",
        drawn_from("leak", "leak", lambda record, table: figures.leak_bars(table)),
        note=(
            "All advantages are 1, so the expected policy gradient is zero. |mu|^2 / V does not grow with the "
            "number of batches; its interval is by the jackknife. The p value is the share of sign flips of "
            'the batches whose mean is at least as large; "p &lt;=" marks the smallest that n batches can '
            "give."
        ),
    ),
    Block(
        "Time of one group",
        "speed",
        drawn_from("speed", "speed", lambda record, table: figures.speed_bars(table)),
        note=(
            "Median over interleaved rounds; the speed-up is the ratio of medians to exact of the same "
            "rounds. Every arm's gradient was checked against a plain loop before it was timed. This is the "
            "update of one group; a training step also has the rollout and the reward, which no estimator "
            "changes."
        ),
    ),
    Block("How exact the reference is", "floor", note="No cosine can be trusted beyond this."),
    MEASURED,
)
"""Of the pages of ``calibrate`` and ``reproduce``."""

SAMPLES = Block("Samples", body="samples.html")
"""Where the folder holds pictures."""
