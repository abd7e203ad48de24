"""What SGLang's forwards read and write, as `BatchView`s."""
