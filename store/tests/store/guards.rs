//! Guards: every bound is judged on its own figure, at its limit it is kept, and what is not known keeps it.

use laser_schema::audit::AuditReport;
use laser_schema::guard::{GuardAction, GuardReport, Guards, Verdict};
use laser_schema::knowledge::Figures;

/// Ten texts of ten tokens, a tenth longer than plain, a quarter longer than before.
fn measured() -> (Figures, AuditReport) {
    let figures = Figures {
        texts: 10,
        tokens: 100,
        relaxed: 20,
        compared: 100,
        previous: 80,
        ngrams: [100, 90, 80],
        distinct_ngrams: [50, 45, 60],
        log_probability: -50.0,
        ..Figures::default()
    };
    let audit = AuditReport {
        texts: 10,
        plain_tokens: 100,
        tokens: 110,
        encoded: 10,
        similarity: 9.0,
        ..AuditReport::default()
    };
    (figures, audit)
}

/// A bound at what was measured is kept, one beyond it is not.
#[track_caller]
fn check(set: fn(&mut Guards, f64), kept: f64, breached: f64, told: &str) {
    let (figures, audit) = measured();
    let breaches = |limit: f64| {
        let mut guards = Guards::default();
        set(&mut guards, limit);
        guards.breaches(&figures, &audit)
    };
    assert_eq!(breaches(kept), []);
    let found = breaches(breached);
    assert_eq!(found.len(), 1);
    assert_eq!(found[0].to_string(), told);
}

#[test]
fn each_bound_is_on_its_own_figure() {
    type Set = fn(&mut Guards, f64);
    let cases: [(Set, f64, f64, &str); 8] = [
        (|g, v| g.min_length_ratio = Some(v), 1.1, 1.2, "length ratio 1.100 is below min_length_ratio = 1.2"),
        (|g, v| g.max_length_ratio = Some(v), 1.1, 1.0, "length ratio 1.100 is above max_length_ratio = 1"),
        (|g, v| g.min_length_drift = Some(v), 1.25, 1.3, "length drift 1.250 is below min_length_drift = 1.3"),
        (|g, v| g.max_length_drift = Some(v), 1.25, 1.2, "length drift 1.250 is above max_length_drift = 1.2"),
        (|g, v| g.min_distinct_2 = Some(v), 0.5, 0.6, "distinct 2 0.500 is below min_distinct_2 = 0.6"),
        (|g, v| g.max_relaxed_share = Some(v), 0.2, 0.1, "relaxed share 0.200 is above max_relaxed_share = 0.1"),
        (
            |g, v| g.min_log_probability = Some(v),
            -0.5,
            -0.4,
            "log probability -0.500 is below min_log_probability = -0.4",
        ),
        (|g, v| g.min_similarity = Some(v), 0.9, 0.95, "similarity 0.900 is below min_similarity = 0.95"),
    ];
    for (set, kept, breached, told) in cases {
        check(set, kept, breached, told);
    }
}

#[test]
fn figures_of_few_texts_and_unknown_ones_breach_nothing() {
    let all = Guards {
        min_texts: 11,
        min_length_ratio: Some(50.0),
        min_length_drift: Some(50.0),
        min_distinct_2: Some(1.0),
        max_relaxed_share: Some(0.0),
        min_log_probability: Some(0.0),
        min_similarity: Some(1.0),
        ..Guards::default()
    };
    let (figures, audit) = measured();
    assert_eq!(all.breaches(&figures, &audit), []);
    let enough = Guards { min_texts: 1, ..all };
    assert_eq!(enough.breaches(&figures, &audit).len(), 6);
    // No earlier texts, no encoder, an engine without probabilities.
    let unknown = Figures { texts: 10, tokens: 100, ..Figures::default() };
    assert_eq!(enough.breaches(&unknown, &AuditReport::default()), []);
}

#[test]
fn figures_of_earlier_versions_are_read_and_know_nothing_new() {
    let old = r#"{"texts":2,"tokens":9,"prompt_tokens":4,"forwards":3,"drafted":2,"accepted":1,"relaxed":0,
        "draft_seconds":0.5,"engine_seconds":1.5}"#;
    let figures: Figures = serde_json::from_str(old).unwrap();
    assert_eq!((figures.texts, figures.tokens), (2, 9));
    assert_eq!((figures.distinct(2), figures.mean_log_probability()), (None, None));
    let old = r#"{"texts":2,"identical":1,"plain_tokens":9,"plain_seconds":0.5,"tokens":9,"seconds":0.25}"#;
    let audit: AuditReport = serde_json::from_str(old).unwrap();
    assert_eq!((audit.texts, audit.mean_similarity()), (2, None));
}

#[test]
fn only_fail_withholds_and_only_for_a_breach() {
    let (figures, audit) = measured();
    let guards = |action| Guards { action, max_relaxed_share: Some(0.1), ..Guards::default() };
    let report = |action, breaches| GuardReport {
        guards: guards(action),
        pools: [("p".to_owned(), Verdict { breaches, ..Verdict::default() })].into(),
    };
    let breaches = guards(GuardAction::Fail).breaches(&figures, &audit);
    assert!(report(GuardAction::Fail, breaches.clone()).withholds());
    assert!(!report(GuardAction::Warn, breaches.clone()).withholds());
    assert!(!report(GuardAction::Strict, breaches).withholds());
    assert!(!report(GuardAction::Fail, Vec::new()).withholds());
}
