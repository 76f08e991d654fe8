"""From a finished validation round to its metrics. Pure."""

from psrl.control.messages import ValidationDone
from psrl.metrics.data_metrics import spread
from psrl.metrics.validation import metric_names, validation_metrics


def round_metrics(done: ValidationDone) -> dict[str, float]:
    """val-core/* and val-aux/* of one round. Failed trajectories are counted, not scored as wrong answers.

    A variable that only some samples of the round carry is left out: its mean would be over a part unseen.
    """
    samples = done.samples
    variables = {"reward": [sample.reward for sample in samples]}
    common = set.intersection(*(set(sample.metrics) for sample in samples)) if samples else set()
    for name in sorted(common):
        variables[name] = [sample.metrics[name] for sample in samples]
    nested = validation_metrics(
        [sample.data_source for sample in samples], [str(sample.group) for sample in samples], variables
    )
    return {
        "val-aux/num_prompts": float(done.num_prompts),
        "val-aux/num_failed": float(done.num_failed),
        **spread("val-aux/response_length", [sample.num_response_tokens for sample in samples]),
        **metric_names(nested),
    }
