"""The training loop of one rank.

Buffer b trains version b into b + 1: step s = b + 1 consumes buffer s - 1 and publishes version s. A step without any
group, or whose updates were all skipped, publishes the same weights under the next version, so that buffer and version
numbers never part.
"""

import logging

import torch

from psrl.config.schema import Config
from psrl.control.messages import EndOfData
from psrl.train.links import TrainerLinks
from psrl.train.ranks import Ranks
from psrl.train.trainer import Trainer

log = logging.getLogger(__name__)


def main(config: Config, links: TrainerLinks) -> None:
    """Train as one rank, in torch.distributed's environment (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT).

    An error is raised with its first cause. The process must then end: that breaks the connections of the other ranks,
    which end with an error of their own within seconds. So nothing is torn down here that could wait for them.
    """
    torch.set_num_threads(config.psrl.deployment.threads_per_process)
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    ranks = Ranks.from_environment(device_type, timeout_s=config.psrl.progress_timeout_s)
    fit(config, links, ranks)
    ranks.leave()


def fit(config: Config, links: TrainerLinks, ranks: Ranks) -> None:
    """Publish what training starts from, then consume, train and publish until the steps or the data end."""
    settings = config.trainer
    trainer = Trainer(config, links, ranks)
    step = trainer.first_step
    trainer.publish(step)
    saved, tested = step, -1  # a kill may have come between the last save and the last validation
    if settings.val_before_train or settings.val_only:
        trainer.log(step, trainer.validate(step))
        tested = step
    if settings.val_only:
        trainer.finish("validation only")
        return
    ending = f"all {links.total_steps} steps are done"
    while step < links.total_steps:
        with trainer.timed("step"):
            meta = trainer.next_batch(buffer=step)
            if isinstance(meta, EndOfData):
                ending = meta.reason
                break
            step += 1
            started_s = trainer.now()
            rows = trainer.fetch(meta)
            plans = trainer.plan(rows)
            old_log_probs, metrics = trainer.old_log_probs(rows, plans)
            advantages = trainer.advantages(rows, plans)
            updated, update_metrics = trainer.update(step, rows, plans, old_log_probs, advantages)
            ended_s = trainer.now()
            # The entropy before the update, where it was computed, stands over the one during it.
            metrics = update_metrics | metrics | trainer.batch_metrics(meta, rows, advantages)
            work = trainer.workload(rows, plans)
            del rows  # views of shared memory: publishing clears them, and validation needs the room
            trainer.publish(step, skipped=not updated)
            if is_due(step, settings.save_freq, links.total_steps):
                metrics |= trainer.save(step, last=step == links.total_steps)
                saved = step
            if is_due(step, settings.test_freq, links.total_steps):
                metrics |= trainer.validate(step)
                tested = step
        metrics |= {"training/global_step": step, "training/started_s": started_s, "training/ended_s": ended_s}
        trainer.log(step, metrics | trainer.work_metrics(work) | trainer.group_metrics())
    if settings.save_freq > 0 and saved < step:
        trainer.save(step, last=True)
    if settings.test_freq > 0 and tested < step:
        trainer.log(step, trainer.validate(step))
    log.info("training ends at step %d: %s", step, ending)
    trainer.finish(ending)


def is_due(step: int, frequency: int, total_steps: int) -> bool:
    """Whether something done every `frequency` steps, and at the last one, is done at `step`; <= 0 is never."""
    return frequency > 0 and (step % frequency == 0 or step == total_steps)
