"""Weights & Biases, if `observe.wandb` names a project. The package is optional, and nothing else imports it."""

import secrets
from collections.abc import Mapping
from pathlib import Path

from megamem.config.schema import RunConfig
from megamem.errors import UserError


class WandbLog:
    """A run of the project; the main process only. A run folder is one run there, however often it is resumed: its id
    is in `out/wandb_id`.

    Raises:
        UserError: the package is missing, or does not start.
    """

    def __init__(self, config: RunConfig):
        out, project = Path(config.out), config.observe.wandb
        try:
            import wandb
        except ImportError as error:
            raise UserError(f"observe.wandb = {project!r}: wandb cannot be imported ({error})") from None
        name = out / "wandb_id"
        if not name.exists():
            name.write_text(secrets.token_hex(8) + "\n", encoding="utf-8")
        try:
            self._run = wandb.init(
                project=project,
                name=out.name,
                id=name.read_text(encoding="utf-8").strip(),
                resume="allow",
                dir=str(out),
                config=config.model_dump(mode="json"),
                settings=wandb.Settings(console="off"),  # the console belongs to the progress bar
            )
        except wandb.Error as error:
            raise UserError(
                f"observe.wandb = {project!r}: wandb does not start ({error}); log in (wandb login), or run without a "
                "network (WANDB_MODE=offline)"
            ) from None

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """One step's numbers. It keeps the first that it gets of a step; those of a resumed run are the same."""
        self._run.log(dict(metrics), step=step, commit=True)

    def close(self, status: int) -> None:
        """Wait until everything is sent; `status` is the process's."""
        self._run.finish(exit_code=status)
