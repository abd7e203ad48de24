"""One file a kind of finding, named as the kind: its sentences, what follows from it, its diagnosis, its text in the
pages. `registry` gathers them; `finding_kind` has the form of such a file, and the other modules what they share."""
