"""DP-PCA finds the subspace that the noise leaves visible, under scikit-learn's conventions."""

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.datasets import load_digits
from sklearn.decomposition import TruncatedSVD
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.utils.estimator_checks import check_estimator

from adadp.errors import ConfigurationError
from adadp.preprocessing import DPPCA
from adadp.preprocessing.pca import unit_rows


def overlap(a, b):
    """Mean squared cosine of the angles between two subspaces: 1 if equal."""
    return float(np.square(np.linalg.svd(a @ b.T, compute_uv=False)).mean())


def test_subspace_approaches_truncated_svd_of_the_unit_rows():
    rows = load_digits().data
    exact = TruncatedSVD(8, algorithm="arpack").fit(unit_rows(rows)).components_
    overlaps = [overlap(DPPCA(8, s, random_state=1).fit(rows).components_, exact) for s in (30.0, 0.3, 1e-3)]
    assert overlaps[0] < overlaps[1] < overlaps[2]
    assert overlaps[1] > 0.97
    assert overlaps[2] == pytest.approx(1.0, abs=1e-5)
    # It is the unit rows' subspace, not that of rows of any length: one huge row would own the latter.
    rows = np.vstack([rows, np.eye(64)[0] * 1e9])
    assert overlap(DPPCA(8, 1e-3, random_state=1).fit(rows).components_, exact) > 0.99


def test_transform_projects_the_rows_as_they_are():
    rows = load_digits().data[:50]
    pca = DPPCA(5, 1.0).fit(rows)
    assert np.allclose(pca.transform(rows), rows @ pca.components_.T)
    assert np.allclose(pca.components_ @ pca.components_.T, np.eye(5))
    assert (np.diff(pca.eigenvalues_) <= 0).all()
    rows[3, 2] = np.nan
    assert np.isnan(pca.transform(rows)).any(axis=1).tolist() == [i == 3 for i in range(50)]


@pytest.mark.filterwarnings("ignore")
def test_scikit_learn_conventions():
    # A data set of no rows is a neighbour of one of one row, so it is not refused.
    check_estimator(
        DPPCA(1, 10.0, random_state=0),
        expected_failed_checks={
            "check_estimators_empty_data_messages": "no rows are a valid data set",
            "check_dtype_object": "says what to do instead",
        },
        on_skip=None,
    )


def test_clone_and_pipeline():
    x, y = load_digits(return_X_y=True)
    pipeline = make_pipeline(DPPCA(20, 2.0, isometric=True, random_state=5), LogisticRegression(max_iter=300))
    charged = []
    ledger = type("Run", (), {"charge": lambda self, event: charged.append(event)})()
    pipeline.fit(x / 16, y, dppca__ledger=ledger)
    assert pipeline.score(x / 16, y) > 0.9
    assert charged == list(pipeline[0].events_)
    assert clone(pipeline[0]).get_params() == pipeline[0].get_params()
    assert not hasattr(clone(pipeline[0]), "events_")


@pytest.mark.parametrize("components", [0, 5, -1])
def test_impossible_number_of_components(components):
    with pytest.raises(ConfigurationError, match=r"1\.\.4"):
        DPPCA(components, 1.0).fit(np.ones((10, 4)))


def test_a_shared_generator_is_refused():
    with pytest.raises(ConfigurationError, match="random_state"):
        DPPCA(1, 1.0, random_state=np.random.default_rng(0)).fit(np.ones((3, 2)))


def test_a_seed_is_an_assumption():
    assert any("seed" in a for a in DPPCA(1, 1.0, random_state=1).fit(np.ones((3, 2))).assumptions_)
    assert not any("seed" in a for a in DPPCA(1, 1.0).fit(np.ones((3, 2))).assumptions_)
