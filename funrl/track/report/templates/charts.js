// Show the values of the measured step nearest to the pointer.
for (const area of document.querySelectorAll('.area')) {
  const {steps, places, names, values} = JSON.parse(area.dataset.values);
  const cursor = area.querySelector('.cursor');
  const tip = area.querySelector('.tip');
  area.addEventListener('pointermove', event => {
    const box = area.getBoundingClientRect();
    const distances = places.map(place => Math.abs(place - (event.clientX - box.left) / box.width));
    const nearest = distances.indexOf(Math.min(...distances));
    const measured = names.map((name, i) => [name, values[i][nearest]]).filter(([, value]) => value !== null);
    tip.textContent = `step ${steps[nearest]}: ` + measured.map(pair => pair.join(' ').trim()).join(', ');
    cursor.style.left = `${100 * places[nearest]}%`;
  });
}
