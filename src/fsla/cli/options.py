"""Options and texts that several commands have."""

from __future__ import annotations

from typing import Annotated

import typer

EXIT_CODES = "Exit codes: 0 done, 1 a check failed, 2 bad input, 70 a defect of fsla, 130 interrupted."
Device = Annotated[str, typer.Option(help="'auto', 'cpu' or 'cuda'.")]
