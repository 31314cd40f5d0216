class MemoryMargin:
    def learn(self, estimate, peak):
        pass

    def margin_bytes(self, estimate, margin):
        return max(margin, int(0.15 * estimate))
