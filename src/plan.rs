//! `laser plan`: what a run would do and, with an estimate, what it would take.

use std::fmt::Write as _;

use anyhow::Result;
use jiff::{Timestamp, tz::TimeZone};
use laser_night::{Config, Night, deadline, demo};
use laser_report::duration;
use laser_schema::estimate::{Estimate, Interval};
use laser_schema::job::Plan;
use laser_schema::knowledge::Figures;
use laser_schema::manifest::Manifest;
use laser_terminal::{Display, Table, print};

/// Shares of the work after which the value that is reached is told.
const VALUE_SHARES: [f64; 6] = [0.0, 0.1, 0.25, 0.5, 0.75, 0.9];

/// What is asked of an estimate.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct EstimateArgs {
    /// Generate a sample of the rows now, and tell tokens, engine time, price and finish time with their intervals.
    #[arg(long)]
    estimate: bool,
    /// Most rows per kind in the sample; 16 batches if not given.
    #[arg(long, value_name = "ROWS", requires = "estimate", value_parser = clap::value_parser!(u32).range(2..))]
    sample: Option<u32>,
    /// Workers as fast as this machine that are going to share the run.
    #[arg(long, requires = "estimate", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    workers: u32,
}

/// Prints what a run would do.
pub(crate) async fn plan(config: &Config, args: &EstimateArgs) -> Result<()> {
    let demo = demo::nights(config)?;
    let config = demo.as_ref().map_or(config, |(_, tonight)| tonight);
    let mut display = Display::new();
    let night = Night::open(config).await?;
    let (plan, manifests, estimate) = match args.estimate {
        false => {
            let (plan, manifests) = night.dry_plan(&mut display).await?;
            (plan, manifests, None)
        }
        true => {
            let sample = args.sample.map(|rows| rows as usize);
            let (plan, manifests, estimate) = night.estimate(sample, &mut display).await?;
            (plan, manifests, Some(estimate))
        }
    };
    drop(display);
    let mut out = counts(&plan);
    let seconds = match &estimate {
        Some(estimate) => {
            out += &render(estimate)?;
            out += &finish(estimate, config, args.workers)?;
            Some(estimate.seconds().mean / f64::from(args.workers))
        }
        None => {
            let (told, seconds) = eta(&plan, &manifests);
            out += &told;
            seconds
        }
    };
    if let Some(priority) = &plan.priority {
        writeln!(out, "By priority {:?}, in {} bands:", priority.expression, priority.bands)?;
        out += &value_table(&plan, seconds).indented();
    }
    print(&out)
}

fn counts(plan: &Plan) -> String {
    let mut out = format!("run {} for {}\n", plan.run, plan.date);
    for (kind, counts) in &plan.counts {
        let shards = plan.shards.iter().filter(|s| s.kind == *kind).count();
        out += &format!(
            "{kind}s: {} entities, {} to generate, {} unchanged, {} failed; {shards} shards, {} prompt tokens\n",
            counts.entities, counts.generate, counts.carried, counts.failed, counts.prompt_tokens
        );
    }
    out
}

/// How long a run takes at last night's speed, and the same in seconds.
fn eta(plan: &Plan, manifests: &[Manifest]) -> (String, Option<f64>) {
    let past: Figures = manifests.iter().flat_map(|manifest| manifest.figures.values()).sum();
    if past.texts == 0 {
        let told = "ETA: unknown, no earlier output of Laser's among [[previous]] to tell the speed from; --estimate \
                    measures it\n";
        return (told.to_owned(), None);
    }
    let texts: u64 = plan.counts.values().map(|c| c.generate).sum::<u64>() * u64::from(plan.spec.samples());
    let tokens = texts as f64 * past.text_length();
    let seconds = tokens / past.tokens_per_second();
    let told = format!(
        "ETA: {seconds:.0} s on one worker for about {tokens:.0} tokens, at last night's {:.0} tokens/s and {:.0} \
         tokens a text\n",
        past.tokens_per_second(),
        past.text_length()
    );
    (told, Some(seconds))
}

/// The estimate by kind and pool.
fn render(estimate: &Estimate) -> Result<String> {
    let mut out = String::new();
    let Estimate { sampled, earlier, groups, audits, .. } = estimate;
    writeln!(out, "Estimate from {sampled} rows that were generated now and {earlier} of earlier nights:")?;
    let mut table = Table::new(&["", "texts", "tokens", "engine time", "interval of 95 %", "price"]);
    let mut row = |name: String, (texts, tokens): (Option<u64>, f64), seconds: Interval| {
        let price = estimate.price_of(seconds).map(|price| format!("{:.4}", price.mean));
        table.push(vec![
            name,
            texts.map_or_else(|| "–".to_owned(), |texts| texts.to_string()),
            if tokens > 0.0 { format!("{tokens:.0}") } else { "–".to_owned() },
            duration(seconds.mean),
            format!("{} to {}", duration(seconds.low), duration(seconds.high)),
            price.unwrap_or_else(|| "–".to_owned()),
        ]);
    };
    for group in groups {
        let pool = if group.pool.is_empty() { String::new() } else { format!(", {}", group.pool) };
        row(format!("{}s{pool}", group.kind), (Some(group.texts), group.tokens.mean), group.seconds);
    }
    for (kind, seconds) in audits {
        row(format!("audit of {kind}s"), (None, 0.0), *seconds);
    }
    let texts = groups.iter().map(|group| group.texts).sum();
    let tokens = groups.iter().map(|group| group.tokens.mean).sum();
    row("all".to_owned(), (Some(texts), tokens), estimate.seconds());
    Ok(out + &table.indented())
}

/// When so many workers would be done, were they to begin now.
fn finish(estimate: &Estimate, config: &Config, workers: u32) -> Result<String> {
    let now = Timestamp::now();
    let seconds = estimate.seconds().times(1.0 / f64::from(workers));
    let clock = |after: f64| -> Result<String> {
        let at = now.checked_add(jiff::SignedDuration::try_from_secs_f64(after)?)?;
        Ok(at.to_zoned(TimeZone::system()).strftime("%a %H:%M").to_string())
    };
    let workers = if workers == 1 { "one worker".to_owned() } else { format!("{workers} workers") };
    let (mean, low, high) = (clock(seconds.mean)?, clock(seconds.low)?, clock(seconds.high)?);
    let mut out = format!("Begun now, {workers} would be done at {mean} ({low} to {high})");
    if let Some(left) = deadline::seconds_until(config.run.deadline, now)? {
        let share = (left / seconds.high.max(f64::MIN_POSITIVE)).min(1.0);
        match share < 1.0 {
            true => write!(out, "; at the deadline at least {:.0} % of the work is done", share * 100.0)?,
            false => out.push_str(", before the deadline"),
        }
    }
    Ok(out + "\n")
}

/// Which share of the value has a text after which share of the work, and when, if that takes so many `seconds`.
fn value_table(plan: &Plan, seconds: Option<f64>) -> Table {
    let kinds: Vec<String> = plan.value_after(0.0).keys().map(|kind| format!("{kind}s' value")).collect();
    let columns = ["rows generated", "after"].into_iter().chain(kinds.iter().map(String::as_str));
    let mut table = Table::new(&columns.collect::<Vec<_>>());
    for share in VALUE_SHARES {
        let time = seconds.map_or_else(|| "–".to_owned(), |seconds| duration(share * seconds));
        let values = plan.value_after(share).into_values().map(|value| format!("{:.1}%", value * 100.0));
        table.push([format!("{:.0}%", share * 100.0), time].into_iter().chain(values).collect());
    }
    table
}
