// The order of what a search finds. A page that has the word comes before a name of which the word is only a part
// ("hang" in `changed_marks`), a lab and a guide before a file, and a solution after its lab.
var Scorer = {
  score: ([page, title, anchor, description, score, file]) =>
    score + (/^(zh\/)?labs\/\d/.test(page) ? 4 : /^docs\//.test(page) ? 2 : /^solutions\//.test(page) ? -2 : 0),
  objNameMatch: 11,
  objPartialMatch: 1,
  objPrio: { 0: 3, 1: 0, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
