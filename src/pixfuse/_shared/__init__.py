"""What every room uses: registration, checks, layout, the test battery and the timing of benches."""
