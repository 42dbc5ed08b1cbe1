//! The audit: the same rows plainly and with speculation, in turns, on the engine that does the work.

use std::time::Instant;

use laser_schema::job::AuditReport;

use crate::generate::{Finished, GenerateError, Generated, Request, TextGenerator};

/// Generates every request both ways, a batch at a time, taking turns so that a drift of the machine's
/// speed hits both alike. Rows that fail either way are left out.
///
/// # Errors
/// The engine's, when it is given up.
pub(crate) fn audit(
    generator: &mut impl TextGenerator,
    requests: &[Request],
) -> Result<AuditReport, GenerateError> {
    let mut report = AuditReport::default();
    for batch in requests.chunks(generator.batch().max(1)) {
        let (plain, plain_seconds) = run(generator, batch, true)?;
        let (fast, seconds) = run(generator, batch, false)?;
        report.plain_seconds += plain_seconds;
        report.seconds += seconds;
        for (plain, fast) in plain.iter().zip(&fast) {
            let (Some(plain), Some(fast)) = (plain, fast) else {
                continue;
            };
            report.texts += 1;
            report.identical += u64::from(plain.tokens == fast.tokens);
            report.plain_tokens += plain.tokens.len() as u64;
            report.tokens += fast.tokens.len() as u64;
        }
    }
    Ok(report)
}

type Texts = Vec<Option<Generated>>;

fn run(
    generator: &mut impl TextGenerator,
    batch: &[Request],
    plain: bool,
) -> Result<(Texts, f64), GenerateError> {
    let start = Instant::now();
    let mut texts: Texts = vec![None; batch.len()];
    for (request, id) in batch.iter().zip(0..) {
        generator.submit(Request {
            id,
            plain,
            ..request.clone()
        });
    }
    while generator.load() > 0 {
        for Finished { id, result } in generator.step()? {
            if let Some(text) = usize::try_from(id).ok().and_then(|i| texts.get_mut(i)) {
                *text = result.ok();
            }
        }
    }
    Ok((texts, start.elapsed().as_secs_f64()))
}
