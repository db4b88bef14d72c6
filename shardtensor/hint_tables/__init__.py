"""Names that people type because other libraries have them, and what to write here: one table for each place.

The main nouns are the tables `MODULES` (names of modules, by module) and `CLASSES` (attributes of objects, by class),
`KEYWORDS` and `ARGUMENTS` (names of arguments), and `POSITIONAL` (arguments by position). A row has the text that an
error adds to its message, with code between backticks, which the message leaves out; the tests run this code. Rows of
the package itself are in the module of the library that has the name: `numpy_names`, `torch_names`, `jax_names` or
`nx_names`; those of a module of it are in `module_names`, those of classes in `attribute_names`, and those of functions
in `argument_names`.

`shardtensor.hints` imports this package when a look-up has failed, and not before; it may import nothing else of the
library.
"""

from __future__ import annotations

from shardtensor.hint_tables.argument_names import ARGUMENTS, KEYWORDS, POSITIONAL
from shardtensor.hint_tables.attribute_names import CLASSES
from shardtensor.hint_tables.module_names import MODULES

__all__ = ["ARGUMENTS", "CLASSES", "KEYWORDS", "MODULES", "POSITIONAL"]
