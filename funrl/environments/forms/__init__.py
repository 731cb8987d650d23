"""Forms of replies: reading calls of tools, and why a template renders a reply otherwise."""
