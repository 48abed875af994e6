"""Training and sampling for programs elsewhere, over HTTP, in the protocol of the `tinker` client."""
