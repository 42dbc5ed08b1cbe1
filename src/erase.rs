//! `laser erase`: prints what was found of entities, and what became of it.

use std::fmt::Write as _;

use anyhow::Result;
use laser_night::erasure::{self, Outcome};
use laser_schema::Kind;
use laser_schema::erasure::Erasure;
use laser_store::run_store::CODES;
use laser_terminal::{Display, print};

use crate::{ConfigArgs, print_json, word};

#[derive(Debug, clap::Args)]
pub(crate) struct EraseArgs {
    #[command(flatten)]
    config: ConfigArgs,
    /// Whose ids they are: `user` or `item`.
    #[arg(long, value_parser = word::<Kind>)]
    kind: Kind,
    /// The ids: a file with one per line, or a .parquet, .csv or .jsonl table with a column `id` or `entity_id`.
    #[arg(long, value_name = "FILE")]
    ids: String,
    /// Only tell what is there and what would become of it.
    #[arg(long)]
    dry_run: bool,
    /// Print the receipts as a JSON list: the output's, and that of its canaries.
    #[arg(long)]
    json: bool,
}

/// `laser erase`.
pub(crate) async fn erase(args: EraseArgs) -> Result<()> {
    let config = args.config.load()?;
    let mut display = Display::new();
    let outcomes = erasure::erase(&config, (args.kind, &args.ids), args.dry_run, &mut display).await?;
    drop(display);
    if args.json {
        return print_json(&outcomes.iter().map(Outcome::erasure).collect::<Vec<_>>());
    }
    outcomes.iter().try_for_each(tell)
}

fn tell(outcome: &Outcome) -> Result<()> {
    match outcome {
        Outcome::Planned(erasure) | Outcome::Absent(erasure) => {
            print(&format!("{}nothing was changed\n", told(erasure, ["would be written anew", "would be removed"])?))
        }
        Outcome::Erased(erasure, receipt) => {
            let mut out = told(erasure, ["written anew", "removed"])?;
            writeln!(out, "nothing is left of them here; receipt: {}\nnot looked at:", receipt.url())?;
            erasure.elsewhere.iter().try_for_each(|place| writeln!(out, "  {place}"))?;
            print(&out)
        }
        Outcome::Nothing(receipt) => {
            let ended = receipt.ended.unwrap_or(receipt.begun);
            print(&format!(
                "nothing is left of these {} {}s, erased {ended:.0} as {}\n",
                receipt.ids, receipt.kind, receipt.name
            ))
        }
    }
}

fn told(erasure: &Erasure, [written, removed]: [&str; 2]) -> Result<String> {
    let Erasure { name, kind, ids, found, places, .. } = erasure;
    let mut out = format!("erasure {name}: {found} of {ids} {kind}s found\n");
    for place in places {
        let objects = place.objects.iter().filter(|object| object.name != CODES).count();
        if objects > 0 {
            writeln!(out, "  {}: {} rows in {objects} objects {written}", place.folder, place.rows())?;
        }
        if objects < place.objects.len() {
            writeln!(out, "  {}/{CODES} {removed}: it names nobody and may be of any user", place.folder)?;
        }
    }
    for set in &erasure.removed {
        writeln!(out, "  {} {removed}: {}", set.folders.join(", "), set.reason)?;
    }
    Ok(out)
}
