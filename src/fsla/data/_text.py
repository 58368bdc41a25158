"""Free text as a few hundred numbers: TF-IDF of words, reduced by a singular value decomposition."""

from __future__ import annotations

from typing import Any, Self

import numpy as np

from fsla._storage._json_values import among, items, record, text
from fsla.data._arrays import stored_array
from fsla.data._columns import is_unspaced
from fsla.data._dataset import Array

DIMENSIONS = 128
MAX_TERMS = 20_000
"""Terms of the vocabulary, the most frequent ones."""
FOR_TREES = 32
"""Leading dimensions that learners on trees take where a table has other columns too."""
SCHEMA = record(terms=items(text), analyzer=among("word", "char"))


class TextVectors:
    """Vectors of length 1 for texts."""

    def fit(self, texts: Any) -> Self:
        """Learn terms, their weights and the leading directions."""
        from sklearn.decomposition import TruncatedSVD

        documents = list(map(str, texts))
        written = [t for t in documents if t.strip()]
        step = max(1, len(written) // 500)
        self.analyzer = "char" if np.mean([is_unspaced(t) for t in written[::step]] or [False]) > 0.5 else "word"
        for min_df in (2, 1):
            vectorizer = self._vectorizer(min_df=min_df, max_features=MAX_TERMS)
            try:
                matrix = vectorizer.fit_transform(documents)
            except ValueError:  # no term is left
                continue
            break
        else:
            self.terms, self.idf, self.components = [], np.zeros(0), np.zeros((0, 0), dtype=np.float32)
            return self
        self.terms = vectorizer.get_feature_names_out().tolist()
        self.idf = vectorizer.idf_
        size = min(DIMENSIONS, *matrix.shape)
        svd = TruncatedSVD(size, random_state=0, n_iter=4).fit(matrix)
        self.components = svd.components_.astype(np.float32)
        return self

    def transform(self, texts: Any) -> Array:
        """Return one row a text; a text without known terms is all zero."""
        documents = list(map(str, texts))
        if not self.terms:
            return np.zeros((len(documents), 0))
        vectorizer = self._vectorizer(vocabulary=self.terms)
        vectorizer.idf_ = self.idf
        vectors: Array = vectorizer.transform(documents) @ self.components.T.astype(np.float64)
        length = np.linalg.norm(vectors, axis=1, keepdims=True)
        return vectors / np.where(length > 0, length, 1.0)

    def _vectorizer(self, **more: Any) -> Any:
        from sklearn.feature_extraction.text import TfidfVectorizer

        ngrams = (1, 2) if self.analyzer == "word" else (1, 3)
        accents = "unicode" if self.analyzer == "word" else None
        return TfidfVectorizer(
            analyzer=self.analyzer, ngram_range=ngrams, sublinear_tf=True, strip_accents=accents, **more
        )

    def to_state(self) -> tuple[dict[str, Array], dict[str, Any]]:
        """Return arrays and JSON values."""
        return {"idf": self.idf, "components": self.components}, {"terms": self.terms, "analyzer": self.analyzer}

    @classmethod
    def from_state(cls, arrays: dict[str, Array], values: dict[str, Any]) -> Self:
        """Restore what `to_state` returned."""
        vectors = cls()
        vectors.terms, vectors.analyzer = values["terms"], values["analyzer"]
        vectors.idf, vectors.components = (
            stored_array(arrays, "idf", 1),
            stored_array(arrays, "components", 2, np.float32),
        )
        number = len(vectors.terms)
        if vectors.idf.shape != (number,) or vectors.components.shape[1:] != ((number,) if number else (0,)):
            raise ValueError(f"The arrays of a text column do not fit its {number} terms.")
        return vectors
