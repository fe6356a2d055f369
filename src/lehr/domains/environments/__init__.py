"""How episodes run. Register a new one in ``ENVIRONMENTS`` or by the entry point ``lehr.environment``."""

from __future__ import annotations

from lehr.core.registry import Registry
from lehr.domains.base import Environment
from lehr.domains.environments.answer import AnswerEnvironment
from lehr.domains.environments.terminal import TerminalEnvironment

ENVIRONMENTS: Registry[Environment] = Registry("environment")
ENVIRONMENTS.register("answer", AnswerEnvironment())
ENVIRONMENTS.register("terminal", TerminalEnvironment())
