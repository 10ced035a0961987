"""SM4-GCM engines behind one small interface, and SM3."""
