"""One file a kind of finding, named as the kind: sentences, consequences, diagnosis, and the text of the pages.
`registry` gathers the files, `finding_kind` has their form, the other modules are shared."""
