"""The processes of a job: what the launcher says of them (`launch`), how they meet and leave (`processes`), who has died
(`lines`)."""
