"""The vault: ciphertext and wrapped keys for workers that may have them."""
