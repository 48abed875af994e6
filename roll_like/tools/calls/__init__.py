"""The formats in which policies write tool calls; `roll_like.tools.parsing` reads them."""
