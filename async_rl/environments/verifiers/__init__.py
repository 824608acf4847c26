"""What scores a completion: one file per verifier. `load.VERIFIERS` names them, `Verified` combines them."""
