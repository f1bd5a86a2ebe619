from services.scheduler.replanning.replan_rule import HORIZON_S, Offer, judge

REST_S = 60.0
LATER = 10 * REST_S


def offer(rate, kept_rate, *, num_gpus=16, num_kept_gpus=16, migration_s=10.0, moved_share=0.5):
    return Offer(
        rate=rate,
        kept_rate=kept_rate,
        num_gpus=num_gpus,
        num_kept_gpus=num_kept_gpus,
        migration_s=migration_s,
        moved_share=moved_share,
    )


def test_a_faster_plan_takes_over_and_says_what_the_change_costs():
    verdict = judge(offer(1.2, 1.0), rested_s=LATER, cool_down_s=REST_S)

    assert verdict.is_revised
    assert "20% faster; the change stops 50% of the generators for 10 s" in verdict.reason


def test_noise_revises_nothing():
    for factor in (0.96, 0.99, 1.0, 1.01, 1.04):
        assert not judge(offer(factor, 1.0), rested_s=LATER, cool_down_s=REST_S).is_revised


def test_a_revision_is_followed_by_a_cool_down():
    assert not judge(offer(2.0, 1.0), rested_s=REST_S - 1, cool_down_s=REST_S).is_revised
    assert judge(offer(2.0, 1.0), rested_s=REST_S, cool_down_s=REST_S).is_revised


def test_a_plan_that_cannot_run_gives_way_at_once():
    assert judge(offer(0.1, 0.0), rested_s=1.0, cool_down_s=REST_S).is_revised
    assert not judge(offer(0.0, 0.0), rested_s=1.0, cool_down_s=REST_S).is_revised


def test_a_change_that_never_pays_for_itself_is_not_made():
    costly = offer(1.06, 1.0, migration_s=HORIZON_S * 0.9, moved_share=1.0)

    assert not judge(costly, rested_s=LATER, cool_down_s=REST_S).is_revised


def test_machines_without_use_are_given_up():
    assert judge(offer(0.995, 1.0, num_gpus=8), rested_s=LATER, cool_down_s=REST_S).is_revised
    assert not judge(offer(0.95, 1.0, num_gpus=8), rested_s=LATER, cool_down_s=REST_S).is_revised
